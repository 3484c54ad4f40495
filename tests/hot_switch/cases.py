# SPDX-License-Identifier: Apache-2.0
"""Made-up models and layouts for property tests of switch plans."""

from hypothesis import strategies as st

from megatron_ext.params import GptShape, Layout


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


@st.composite
def layouts(draw: st.DrawFn, world: int, layers: int, experts: int) -> Layout:
    """Layouts of `world` ranks that can hold the shapes below: every cut axis is a multiple of 24."""
    pp = draw(st.sampled_from(divisors(world)))
    tp = draw(st.sampled_from(divisors(world // pp)))
    cp = draw(st.sampled_from(divisors(world // pp // tp)))
    ep = draw(st.sampled_from([n for n in divisors(world // pp) if experts and experts % n == 0] or [1]))
    etp = draw(st.sampled_from(divisors(world // pp // ep)))
    vpp = draw(st.integers(1, 2)) if pp > 1 else 1
    cuts = sorted(draw(st.lists(st.integers(0, layers), min_size=pp * vpp - 1, max_size=pp * vpp - 1)))
    counts = tuple(b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True))
    return Layout(tp=tp, pp=pp, cp=cp, dp=world // (tp * pp * cp), ep=ep, etp=etp, vpp=vpp, layers_per_chunk=counts)


@st.composite
def shapes(draw: st.DrawFn) -> GptShape:
    """Small GPTs of every kind."""
    flag = st.booleans()
    layers = draw(st.integers(1, 2))
    experts = draw(st.sampled_from((None, None, 2, 4)))
    return GptShape(
        num_layers=layers,
        hidden_size=3,
        ffn_hidden_size=24,
        num_attention_heads=24,
        num_query_groups=draw(st.sampled_from((None, 6, 12))),
        kv_channels=2,
        padded_vocab_size=24,
        max_sequence_length=draw(st.sampled_from((0, 5))),
        share_embeddings_and_output_weights=draw(flag),
        gated_linear_unit=draw(flag),
        add_bias_linear=draw(flag),
        qk_layernorm=draw(flag),
        normalization=draw(st.sampled_from(("LayerNorm", "RMSNorm"))),
        num_moe_experts=experts,
        moe_ffn_hidden_size=draw(st.sampled_from((None, 48))),
        moe_layers=tuple(draw(st.lists(flag, min_size=layers, max_size=layers))) if experts else (),
        moe_shared_expert_intermediate_size=draw(st.sampled_from((None, 48))),
        moe_router_enable_expert_bias=draw(flag),
    )


@st.composite
def chains(draw: st.DrawFn, length: int = 2) -> tuple[GptShape, tuple[Layout, ...], int]:
    """A model, `length` layouts of the same ranks, and a number of GPUs per node."""
    shape = draw(shapes())
    world = draw(st.sampled_from((1, 2, 4, 6, 8, 12)))
    drawn = [draw(layouts(world, shape.num_layers, shape.num_moe_experts or 0)) for _ in range(length)]
    return shape, tuple(drawn), draw(st.sampled_from(divisors(world)))
