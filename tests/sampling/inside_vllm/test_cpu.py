"""The LoRA products that replace vLLM's on a CPU."""

import torch

from tinsmith.sampling.inside_vllm import cpu


def test_each_token_gets_its_slot_and_none_where_there_is_none() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(5, 8, generator=generator)
    a, b = torch.randn(3, 1, 4, 8, generator=generator), torch.randn(3, 1, 6, 4, generator=generator)
    slots = torch.tensor([2, -1, 0, 2, -1])
    low, out = torch.ones(5, 4), torch.ones(5, 9)
    cpu.shrink(inputs, a, low, slots, 2.0)
    cpu.expand_slice(low, b, out, slots, 1, 6)
    for token, slot in enumerate(slots.tolist()):
        expected = torch.ones(9)
        if slot >= 0:
            expected[1:7] += b[slot, 0] @ (2.0 * a[slot, 0] @ inputs[token])
        torch.testing.assert_close(out[token], expected)


def test_one_slot_for_many_rows() -> None:
    inputs, weights = torch.ones(3, 2), torch.ones(2, 4, 2)
    output = torch.zeros(3, 4)
    cpu.expand(inputs, weights, output, torch.tensor([1]))
    assert (output == 2).all()
    cpu.expand(inputs, weights, output, torch.tensor([-1]), add_inputs=False)
    assert (output == 0).all()
