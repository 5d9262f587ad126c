"""What an ablation found, in words and as a table."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from v41c.ablate import AGAIN, FULL, NONE, PHASES, AblateOptions, AblateReport, Judgement, Ratio, Variant
from v41c.passes.pipeline import PIPELINE
from v41c.terminal import bytes_text, table

_HEADER = ("left out", "decode", "prefill", "traffic", "arithmetic", "launches", "memory", "logits rel. L2", "KL")


def judge(variants: Sequence[Variant], savings: Mapping[str, int | None], options: AblateOptions) -> list[Judgement]:
    """A judgement on every pass that was left out; `savings`: the context from which it saves work, None for never."""
    named = {variant.name: variant for variant in variants}
    full, again = named.pop(FULL), named.pop(AGAIN)
    return [_judgement(variant, full, again, savings.get(name), options) for name, variant in named.items()]


def verdict_of(ratio: Ratio, again: Ratio) -> str:
    """Of the time without a pass: beyond the noise of its own rounds and of the full engine against itself, or not."""
    noise = noise_of(ratio, again)
    if ratio.median - 1 > noise and ratio.low > 1:
        return "pays"
    return "costs" if 1 - ratio.median > noise and ratio.high < 1 else "neither"


def noise_of(ratio: Ratio, again: Ratio) -> float:
    """What a difference must be beyond: half the quartiles' distance, here or for two runs of the same engine."""
    return max(ratio.noise, again.noise, abs(again.median - 1))


def _judgement(
    variant: Variant, full: Variant, again: Variant, begins: int | None, options: AblateOptions
) -> Judgement:
    verdict: dict[str, str] = {phase: verdict_of(variant.ratios[phase], again.ratios[phase]) for phase in PHASES}
    found = ", ".join(_phase(phase, verdict[phase], variant, again) for phase in PHASES)
    text = f"{variant.name}: {found}"
    if variant.name == NONE:
        text = f"all of them together: {found}"
    elif "pays" not in verdict.values():
        text += f"; {_why_not(variant, full, begins, options.context)}"
    return Judgement(variant.name, verdict, text)


def _phase(phase: str, verdict: str, variant: Variant, again: Variant) -> str:
    ratio = variant.ratios[phase]
    words = {"pays": f"pays in {phase}", "costs": f"COSTS time in {phase}", "neither": f"no difference in {phase}"}
    return f"{words[verdict]} ({ratio.median:.3f}x without, noise ±{noise_of(ratio, again.ratios[phase]):.3f})"


def _why_not(variant: Variant, full: Variant, begins: int | None, context: int) -> str:
    """What a pass that gains no time here is for, or from which context on it gains some."""
    if begins is not None and begins > context:
        return (
            f"a decode step computes or reads less from a context of about {begins} tokens on: try --context {begins}"
        )
    saved = [
        f"{1 - 1 / share:.0%} of a decode step's {what}"
        for what, share in (("arithmetic", variant.arithmetic), ("traffic", variant.traffic))
        if share >= 1.01
    ]
    if variant.launches > full.launches:
        saved.append(f"{full.launches} launches a token instead of {variant.launches}")
    if variant.arena_bytes > full.arena_bytes:
        saved.append(f"{bytes_text(full.arena_bytes)} of activations instead of {bytes_text(variant.arena_bytes)}")
    what = f"what it gives is {' and '.join(saved)}" if saved else "it saves no work, launches or memory here"
    return f"{what}; its file says: {_reason(variant.name)}"


def _reason(name: str) -> str:
    """The first sentence of a pass's Why."""
    for entry, _ in PIPELINE:
        found = re.search(r"^Why:(.*)", entry.__doc__ or "", re.DOTALL | re.MULTILINE)
        if name == entry.NAME and found:
            return f"{' '.join(found[1].split()).split('. ')[0].rstrip('.')}."
    return "nothing."


def report_text(report: AblateReport) -> str:
    """The table, and a line for every pass."""
    return "\n".join(_lines(report))


def _lines(report: AblateReport) -> Iterator[str]:
    options = report.options
    full = next(variant for variant in report.variants if variant.name == FULL)
    speeds = ", ".join(f"{phase} {1 / full.seconds[phase]:.1f} tokens/s" for phase in PHASES)
    yield f"ablation  {report.checkpoint} for {report.target}, {report.arithmetic} arithmetic: {speeds}"
    yield (
        f"measured  decode at context {options.context}, prefill of {options.prefill_tokens} tokens; {options.rounds} "
        "rounds in which every engine has its turn"
    )
    yield "          times are those without the pass over those with every pass: median ± half the quartiles' distance"
    yield ""
    yield table(_HEADER, [_row(variant) for variant in report.variants])
    yield ""
    yield from (judgement.text for judgement in report.judgements)


def _row(variant: Variant) -> tuple[str, ...]:
    times = ("1", "1") if variant.name == FULL else tuple(_times(variant.ratios[phase]) for phase in PHASES)
    error = ("same bits", "0") if variant.identical else (f"{variant.relative_l2:.2g}", f"{variant.kl_nats:.2g}")
    name = {FULL: "nothing", AGAIN: "nothing, again", NONE: "every optional pass"}.get(variant.name, variant.name)
    shares = f"{variant.traffic:.2f}x", f"{variant.arithmetic:.2f}x"
    return (name, *times, *shares, str(variant.launches), bytes_text(variant.arena_bytes), *error)


def _times(ratio: Ratio) -> str:
    return f"{ratio.median:.3f} ±{ratio.noise:.3f}"
