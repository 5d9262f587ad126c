"""Images in chats: the answer is that of the same prompt in a session, and what is no image is refused."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator

import openai
import pytest
from PIL import Image

from tests.serve.serving import Running, running
from tests.serve.test_serve import with_template
from tests.vision_model import RULES, checkpoint_and_engine, noise
from v41c.runtime.artifact import Engine, load
from v41c.runtime.generate import Generation
from v41c.runtime.images import make_picture
from v41c.runtime.request import Options
from v41c.runtime.session import Session
from v41c.runtime.text import Text
from v41c.runtime.vision import encode, with_images
from v41c.serve.server import ServeOptions

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("vision")
    _, plain = checkpoint_and_engine(folder)
    return load(with_template(plain, folder / "served", TEMPLATE))


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Running]:
    with running(engine, ServeOptions(port=0, slots=1, name="eyes")) as one:
        yield one


def data_url(seed: int) -> str:
    file = io.BytesIO()
    Image.fromarray(noise(seed, 60, 50)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def asked(server: Running, *urls: str) -> openai.types.chat.ChatCompletion:
    parts = [{"type": "text", "text": "see "}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
    with server.client() as client:
        return client.chat.completions.create(
            model="eyes", messages=[{"role": "user", "content": parts}], temperature=0, max_completion_tokens=5
        )


def test_a_chat_sees_its_images(server: Running, engine: Engine) -> None:
    text = Text(engine)
    pictures = [make_picture(noise(seed, 60, 50), RULES) for seed in (1, 2)]
    prompt = with_images(encode(text, "user: see <image><image>\n", engine), pictures, engine)
    generation = Generation(Session(engine), prompt, Options(5), text)
    wanted = "".join(piece.text for piece in generation)
    answer = asked(server, data_url(1), data_url(2))
    assert answer.choices[0].message.content == wanted
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "https://example.com/a.png",
            r"messages\[0\].content\[1\]: expected data:image/…;base64,…: nothing is fetched",
        ),
        ("data:image/png;base64,@@", r"messages\[0\].content\[1\]: expected base64"),
        ("data:image/png;base64,aGVsbG8=", r"messages\[0\].content\[1\]: expected a PNG, JPEG or WebP image"),
    ],
)
def test_what_is_no_image_is_refused(server: Running, url: str, message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        asked(server, url)
