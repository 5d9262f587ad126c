"""The graph IR: typed SSA graphs over flattened tokens, linear states, and one declaration per operation.

Axis letters, used in every docstring and shape comment:

    T  tokens of a step, flattened over sequences     S   sequence slots
    R  rows that get logits                           C{r} capacity of a compressed cache of ratio r (C1, C2, …)
    D  model width                                    N   residual copies
    H  attention heads                                HD  head width
    HI, DI  index heads, index head width             W   window length
    K  reduction axis of a product                    M   output axis of a product
    E  experts                                        V   vocabulary
    P  candidate blocks                               Q   Engram rows per token
    I  rows of the vision tower that a step is given  G   patches that a row of it is made of

In the graph `vision` the tokens T are patches of images, and the rows R are what the tower gives for them.
"""
