"""Forty and more faults that would train or sample something else without a word, each of which a test must find.

A `Mutation` is a small patch of the product. It is applied to a copy, and those tests run that must fail then:

    python -m tests.mutations                  all of them; `make mutations` does this
    python -m tests.mutations "ppo" "AdamW"    those whose names contain one of these
    python -m tests.mutations --baseline       first the same tests on the product as it is, which must pass

A mutation is caught by a test that fails. One whose tests all pass has survived: a test is missing. One whose copy
cannot be imported, or whose tests are not there, is broken and counts as neither.

One process imports the large libraries, and nothing of the product. It forks itself for each mutation: none waits for
these imports.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).parent.parent

LIMIT_S = 300.0
"""Seconds after which a mutation counts as broken: its tests wait for something that never comes."""

PRELOADED = (
    "numpy",
    "torch",
    "transformers",
    "peft",
    "pytest",
    "hypothesis",
    "sqlalchemy",
    "alembic",
    "fastapi",
    "httpx",
    "safetensors.torch",
)
"""What most tests import, beside the product."""


@dataclass(frozen=True)
class Mutation:
    """A fault of the product."""

    name: str
    """What is wrong, in words."""
    path: str
    """The file that is patched, below the repository."""
    old: str
    """What stands there once."""
    new: str
    """What stands there instead."""
    tests: tuple[str, ...]
    """Files of tests, or node ids, of which one must fail."""


@dataclass(frozen=True)
class Ended:
    """What a run of tests came to."""

    outcome: Literal["caught", "survived", "broken"]
    seconds: float
    detail: str
    """The test that failed and with which error, or why nothing can be said."""


PEFT = "tests/training/test_against_peft.py"
OPTIMIZER = "tests/training/test_optimizer.py"
LOSSES = "tests/training/test_losses.py"
CHECKPOINT = "tests/training/test_checkpoint.py"
EXPORT = "tests/training/test_peft_format.py"
REPLAY = "tests/training/test_replay.py"
PAGED = "tests/training/test_paged_state.py"
CAPTURED = "tests/training/test_captured_pass.py"
BACKEND = "tests/training/test_backend.py"
CHOOSE = "tests/sampling/test_choose.py"
SAMPLER = "tests/sampling/local/test_sampler.py"
EXPERTS = "tests/models/test_experts.py"
QUANTIZED = "tests/models/test_quantized.py"
RECOVERY = "tests/engine/test_recovery.py"
ENGINE_DEATH = "tests/engine/test_engine_death.py"

MUTATIONS = (
    # ---- What is trained on
    Mutation(
        "two texts of a conversation make a control token together",
        "tinsmith/chat/format.py",
        "return text[:tail] + self._in_begun.sub(_with_break, text[tail:])",
        "return text",
        ("tests/chat/test_template.py",),
    ),
    Mutation(
        "a control token that is broken up is found again where another begins before it",
        "tinsmith/chat/format.py",
        "            begin = found.start() + 1\n",
        "            return False\n",
        ("tests/chat/test_template.py",),
    ),
    Mutation(
        "a model's own code that renders conversations is passed over",
        "tinsmith/chat/format.py",
        "if text is None or _REPLACES.search(text):",
        "if text is None:",
        ("tests/chat/test_template.py",),
    ),
    Mutation(
        "references of a tool's schema lead elsewhere",
        "tinsmith/chat/grammar.py",
        'moved["$ref"] = place + reference[1:]',
        'moved["$ref"] = reference',
        ("tests/chat/test_grammar.py",),
    ),
    Mutation(
        "an upload is taken for an adapter of another shape than it has",
        "tinsmith/worker/imports.py",
        "if found := shape.differences(wanted):",
        "if found := wanted.differences(wanted):",
        ("tests/acceptance/test_uploads.py",),
    ),
    Mutation(
        "a neighbour in memory takes the place of a tensor in its checkpoint",
        "tinsmith/training/tensor_files.py",
        "TensorFile.of({name: (tensor.dtype, tensor.shape) for name, tensor in whole.items()})",
        "TensorFile.of({name: (tensor.dtype, tensor.shape) for name, tensor in sorted(whole.items())})",
        ("tests/training/test_tensor_files.py",),
    ),
    Mutation(
        "a copy of an adapter names its matrices in another order than that of its memory",
        "tinsmith/training/tensor_files.py",
        "for end in endings for place in form.order}",
        "for end in endings for place in sorted(form.order)}",
        ("tests/training/test_tensor_files.py",),
    ),
    Mutation(
        "a copy of an adapter goes on to train",
        "tinsmith/training/backend.py",
        """{"": model.weights.flat.clone()}""",
        """{"": model.weights.flat}""",
        (CHECKPOINT,),
    ),
    Mutation(
        "a base model whose files have changed is not checked again",
        "tinsmith/worker/bases.py",
        "    if again and not why:",
        "    if again:",
        ("tests/worker/test_bases.py",),
    ),
    Mutation(
        "targets are shifted by one",
        "tinsmith/training/step.py",
        "targets = upload(target_tokens, base.device)",
        "targets = upload(np.roll(target_tokens, -1, 0), base.device)",
        (PEFT,),
    ),
    Mutation(
        "an infinite weight of the head makes gradients of rows that have none NaN",
        "tinsmith/training/logprobs.py",
        "        dh.masked_fill_(g.eq(0).all(-1, keepdim=True), 0.0)",
        "        g.eq(0)",
        ("tests/training/test_logprobs.py",),
    ),
    Mutation(
        "gradients of layers that nobody accumulates are dropped",
        "tinsmith/models/streamed_decoder.py",
        '        raise TypeError("the gradients of weights',
        '        return self.layer(index), ()\n        raise TypeError("the gradients of weights',
        ("tests/models/test_host_layers.py",),
    ),
    Mutation(
        "working copies of a model that comes back to the device are what lay there before",
        "tinsmith/training/paged_state.py",
        "            model.weights.refresh()\n",
        "",
        (PAGED,),
    ),
    Mutation(
        "gradients that wait for their step are lost when their model is paged out",
        "tinsmith/training/paged_state.py",
        "        model.on_host = pieces\n",
        "        model.on_host = pieces\n        model.optimizer.accumulator.totals = None\n",
        (PAGED,),
    ),
    Mutation(
        "a snapshot after a step is the one before it",
        "tinsmith/training/backend.py",
        "        self.frozen.pop(model_id, None)\n        try:\n",
        "        try:\n",
        (PAGED,),
    ),
    Mutation(
        "a captured pass computes with the adapter of the pass before",
        "tinsmith/training/captured_pass.py",
        (
            "        frame.adapter.flat_working.copy_(adapter.flat_working)\n        "
            "frame.embeddings[:tokens].copy_(embeddings)"
        ),
        "        frame.embeddings[:tokens].copy_(embeddings)",
        (CAPTURED,),
    ),
    Mutation(
        "sequences of a captured pass begin where those of the pass before began",
        "tinsmith/training/captured_pass.py",
        "frame.cu_seqlens[: len(begins)].copy_(upload(begins, embeddings.device))",
        "pass",
        (CAPTURED,),
    ),
    Mutation(
        "what fills a captured row gets the gradient of the row before",
        "tinsmith/training/captured_pass.py",
        "self.frame.d_hidden[tokens : self.kind.tokens].zero_()",
        "pass",
        (CAPTURED,),
    ),
    Mutation(
        "of texts of several adapters that are computed apart, those of the last are computed with each",
        "tinsmith/training/pass_runner.py",
        "return list(models.values())\n",
        "return [own] * len(models)\n",
        (CAPTURED,),
    ),
    Mutation(
        "a position's weight is dropped: it counts as 1",
        "tinsmith/training/losses.py",
        "return torch.where(weights == 0, 0.0, weights * logprobs)",
        "return torch.where(weights == 0, 0.0, logprobs)",
        (LOSSES,),
    ),
    Mutation(
        "columns of a CSR tensor are shifted by one",
        "tinsmith/wire/tensors.py",
        "dense[row, col] = values",
        "dense[row, (col + 1) % columns] = values",
        ("tests/wire/test_tensors.py",),
    ),
    Mutation(
        "results of datums come in the order of the row, not of the request",
        "tinsmith/training/step.py",
        "results = {order[place]: result for place, result in of_row.items()}",
        "results = of_row",
        (BACKEND,),
    ),
    Mutation(
        "a part of a sampled sequence gets the log-probabilities of its beginning",
        "tinsmith/worker/provenance.py",
        "logprobs[start:end] = sequence.logprobs[span.offset : span.offset + span.length]",
        "logprobs[start:end] = sequence.logprobs[: span.length]",
        ("tests/worker/test_provenance.py",),
    ),
    # ---- Gradients
    Mutation(
        "gradients count twice when a pass is computed again for want of memory",
        "tinsmith/training/step.py",
        "    return [\n"
        "        optimizer.accumulator.contribution(list(islice(gradients, len(optimizer.weights.leaves()))))\n"
        "        for optimizer in optimizers\n"
        "    ]\n",
        "    for optimizer in optimizers:\n"
        "        optimizer.accumulator.contribution(list(islice(gradients, len(optimizer.weights.leaves()))))()\n"
        "    return []\n",
        ("tests/training/test_pass_failures.py",),
    ),
    Mutation(
        "gradients of the second half of a pass that was split are lost",
        "tinsmith/training/pass_runner.py",
        "outcome = self._compute(part, backward)",
        (
            "outcome = self._compute(part, backward and chosen[0] in {row[0] for row in "
            "self._rows(work, there, backward)})"
        ),
        ("tests/training/test_pass_failures.py",),
    ),
    Mutation(
        "gradients are divided by the number of positions in the batch",
        "tinsmith/training/step.py",
        "ones = [torch.ones_like(of_positions) for of_positions in losses]",
        "ones = [torch.full_like(of_positions, 1 / len(of_positions)) for of_positions in losses]",
        (PEFT,),
    ),
    Mutation(
        "gradients of a step are counted again in the next",
        "tinsmith/training/optimizer.py",
        "totals, self.totals = self.totals, None",
        "totals = self.totals",
        (OPTIMIZER,),
    ),
    # ---- LoRA
    Mutation(
        "alpha / rank is applied twice",
        "tinsmith/models/lora.py",
        "self.scale = LORA_ALPHA / self.shape.rank",
        "self.scale = (LORA_ALPHA / self.shape.rank) ** 2",
        (PEFT,),
    ),
    Mutation(
        "alpha / rank is applied twice in the gradient of B",
        "tinsmith/models/packed_lora.py",
        "found = _scaled_product(_outputs(mine, group).mT, self._reduced(reduced, group), self.scale, like=group.b)",
        "found = _scaled_product(_outputs(mine, group).mT, self._reduced(reduced, group), self.scale**2, like=group.b)",
        ("tests/models/test_decoder.py", PEFT),
    ),
    Mutation(
        "the adapter of one projection is dropped",
        "tinsmith/models/packed_lora.py",
        "if adapter is None or stacked is None:",
        'if adapter is None or stacked is None or linear.projection.name.endswith("down_proj"):',
        (PEFT,),
    ),
    Mutation(
        "the input of a layer gets no gradient through its adapter",
        "tinsmith/models/packed_lora.py",
        "_add_product(part.of(dh), du, part.a, part.scale)",
        "pass",
        ("tests/models/test_decoder.py", PEFT),
    ),
    Mutation(
        "a sequence of a packed row is computed with its neighbour's adapter",
        "tinsmith/rendering/packing.py",
        "if segments and segments[-1].adapter is adapter:",
        "if segments and adapter is not None:",
        (BACKEND,),
    ),
    Mutation(
        "a row of a decode batch is computed with its neighbour's adapter",
        "tinsmith/models/batched_lora.py",
        "start, end = self.columns.unsqueeze(-1).unbind(1)",
        "start, end = self.columns.roll(1, 0).unsqueeze(-1).unbind(1)",
        (f"{SAMPLER}::test_logprobs_equal_the_trainers_for_many_weights_in_one_batch",),
    ),
    Mutation(
        "the sampler leaves out the adapter of the output projection",
        "tinsmith/sampling/local/prompt_pass.py",
        "*head_lora(weights)",
        "*head_lora(None)",
        (f"{SAMPLER}::test_logprobs_equal_the_trainers_for_many_weights_in_one_batch",),
    ),
    Mutation(
        "the adapter of a tied output projection is merged into the embedding too",
        "tinsmith/training/peft_format.py",
        "if LM_HEAD in adapter.masters and head.weight is network.get_input_embeddings().weight:",
        "if LM_HEAD not in adapter.masters:",
        (EXPORT,),
    ),
    # ---- Mixtures of experts
    Mutation(
        "a token's experts are computed with its neighbour's adapter",
        "tinsmith/models/experts.py",
        "else chosen * owners + owner.unsqueeze(1)",
        "else chosen * owners + owner.roll(1).unsqueeze(1)",
        (EXPERTS,),
    ),
    Mutation(
        "the router's weights do not reach the inside of an adapter's down",
        "tinsmith/models/experts.py",
        "pairs.summed(grouped_product(activated, lora[3], pairs.ends) * of_pairs)",
        "pairs.summed(grouped_product(activated, lora[3], pairs.ends))",
        (EXPERTS,),
    ),
    Mutation(
        "the router's weights lie in the order of tokens, not of experts",
        "tinsmith/models/experts.py",
        "return of_tokens.flatten().index_select(0, self.order).unsqueeze(1)",
        "return of_tokens.flatten().unsqueeze(1)",
        (EXPERTS,),
    ),
    Mutation(
        "alpha / rank is not applied to down of experts",
        "tinsmith/models/experts.py",
        "factors.down.b.t(), alpha=scale)",
        "factors.down.b.t())",
        (EXPERTS,),
    ),
    Mutation(
        "of the A's that experts share only that of gate gets a gradient",
        "tinsmith/models/experts.py",
        "torch.cat([factors.gate.a, factors.up.a])",
        "torch.cat([factors.gate.a, factors.up.a.detach()])",
        (EXPERTS,),
    ),
    Mutation(
        "the router's weights do not reach the gradient of A of an adapter's down",
        "tinsmith/models/experts.py",
        "outer_product(d_inside * of_pairs, activated, a_down, pairs.ends)",
        "outer_product(d_inside, activated, a_down, pairs.ends)",
        (EXPERTS,),
    ),
    Mutation(
        "probabilities of the chosen experts are not normalised",
        "tinsmith/models/experts.py",
        "weights = weights / weights.sum(-1, keepdim=True)",
        "pass",
        (EXPERTS,),
    ),
    Mutation(
        "full-parameter training trains the router",
        "tinsmith/models/layout.py",
        'gates = ("gate", "router", "shared_expert_gate")',
        'gates = ("router", "shared_expert_gate")',
        (EXPERTS,),
    ),
    Mutation(
        "the gate of a shared expert is left out",
        "tinsmith/models/decoder.py",
        "return shared.adapters.apply(self.gate, normed).sigmoid() * self.mlp.of_normed(normed, shared)",
        "return self.mlp.of_normed(normed, shared)",
        ("tests/models/test_decoder.py", PEFT),
    ),
    Mutation(
        "a NaN in one group of rows reaches the products of the others",
        "tinsmith/models/grouped_product.py",
        "y = torch.where(rows, x @ weight[group].t(), y)",
        "y = y + (rows * x) @ weight[group].t()",
        ("tests/models/test_grouped_product.py",),
    ),
    Mutation(
        "in a decode batch down of experts gets the adapters of all rows",
        "tinsmith/models/batched_lora.py",
        "addmm_(self._own_of(inside), matrices.outer.t())",
        "addmm_(inside * self._scale, matrices.outer.t())",
        (EXPERTS,),
    ),
    Mutation(
        "adapters of experts are lost when a decode batch gets more columns",
        "tinsmith/models/batched_lora.py",
        "experts[name].copy_from(smaller, self.columns)",
        "pass",
        (EXPERTS,),
    ),
    Mutation(
        "an adapter that leaves experts bare decodes with what its columns held before",
        "tinsmith/models/batched_lora.py",
        "torch._foreach_zero_(places)",
        "pass",
        (EXPERTS,),
    ),
    Mutation(
        "the backward of quantized experts reads what was unpacked last, for another layer",
        "tinsmith/models/experts.py",
        "None if isinstance(own, Tensor) else own for own in (gate_up, down)]",
        "None if isinstance(own, Tensor) else own.unpacked(pairs.expert_ends) for own in (gate_up, down)]",
        (QUANTIZED,),
    ),
    Mutation(
        "the two codes of a byte are taken in the other order",
        "tinsmith/models/quantized.py",
        "torch.stack([codes & 15, codes >> 4], -1)",
        "torch.stack([codes >> 4, codes & 15], -1)",
        (QUANTIZED,),
    ),
    Mutation(
        "a decoding step takes the two codes of a byte in the other order",
        "tinsmith/kernels/experts.py",
        "tl.interleave(low, high)",
        "tl.interleave(high, low)",
        ("tests/kernels/test_experts.py",),
    ),
    Mutation(
        "all parameters but those of quantized experts are trained as if these were there",
        "tinsmith/models/base.py",
        "        if self.expert_format is not None:\n            raise UserError(",
        "        if False:\n            raise UserError(",
        (QUANTIZED,),
    ),
    Mutation(
        "biases of down of experts are added whole, however little an expert counts",
        "tinsmith/models/experts.py",
        ".scatter(1, chosen, weights), bias)",
        ".scatter(1, chosen, torch.ones_like(weights)), bias)",
        (EXPERTS,),
    ),
    Mutation(
        "of two numbers in a byte of MXFP4 the second comes first",
        "tinsmith/models/mxfp4.py",
        "torch.stack([bits & 15, bits >> 4], -1)",
        "torch.stack([bits >> 4, bits & 15], -1)",
        ("tests/models/test_mxfp4.py",),
    ),
    # ---- Router replay
    Mutation(
        "a token follows the experts of the one before",
        "tinsmith/models/attention.py",
        "return torch.where(route < 0, chosen, route.to(chosen.dtype))",
        "return torch.where(route < 0, chosen, route.roll(1, 0).to(chosen.dtype))",
        (REPLAY,),
    ),
    Mutation(
        "followed experts have the weights of those that the router would have chosen",
        "tinsmith/models/experts.py",
        "weights = probabilities.gather(1, chosen)",
        "weights = probabilities.topk(self.kind.per_token, dim=-1).values",
        (REPLAY,),
    ),
    Mutation(
        "a replayed pass follows the experts of the row before",
        "tinsmith/training/captured_pass.py",
        "self.routes.fill_(-1)",
        "pass",
        (REPLAY,),
    ),
    Mutation(
        "a sequence of several workers chooses its experts freely",
        "tinsmith/training/parallel/sequence_parallel.py",
        "return chosen if self.routes is None else followed(self.routes[mixture], chosen)",
        "return chosen",
        ("tests/distributed/test_sequences.py",),
    ),
    Mutation(
        "a forked sample has no experts of the end of its prompt",
        "tinsmith/sampling/local/kv_cache.py",
        "self.routes[:, target] = self.routes[:, block]",
        "pass",
        ("tests/sampling/local/test_routes.py",),
    ),
    Mutation(
        "a datum follows the experts of a sample that ends otherwise",
        "tinsmith/worker/datums.py",
        "np.append(datum.measured.identity, datum.targets[-1])",
        "np.append(datum.measured.identity, 0)",
        ("tests/worker/test_routes.py",),
    ),
    # ---- Packed sequences
    Mutation(
        "the backward of attention with sinks has the softmax of attention without",
        "tinsmith/models/attention.py",
        "ctx.save_for_backward(query, key, value, sinks, out, of_all)",
        "ctx.save_for_backward(query, key, value, sinks, out, lse)",
        ("tests/models/test_decoder.py",),
    ),
    Mutation(
        "tokens that are decoded know no sinks",
        "tinsmith/sampling/local/decode_step.py",
        "            return compute(query, keys, values, table, lengths, scale, window, sinks)",
        "            return compute(query, keys, values, table, lengths, scale, window, None)",
        ("tests/sampling/local/test_sampler.py",),
    ),
    Mutation(
        "attention reaches the sequences before",
        "tinsmith/models/attention.py",
        "self.runs = group_runs(lengths)",
        "self.runs = group_runs([sum(lengths)])",
        ("tests/models/test_decoder.py", BACKEND),
    ),
    Mutation(
        "a convolution reaches the sequence before, forward and backward",
        "tinsmith/models/attention.py",
        "return convolve_anew(x, weight, self.lengths)",
        "return convolve_anew(x, weight, (len(x),))",
        (PEFT,),
    ),
    Mutation(
        "the gradient of a convolution reaches the sequence before",
        "tinsmith/models/delta_rule.py",
        "places, taps = ctx.places, weight.shape[1]",
        "places, taps = _places_of((len(x),), weight.shape[1] - 1, x.device), weight.shape[1]",
        (PEFT,),
    ),
    Mutation(
        "the state of a delta net goes on into the next sequence",
        "tinsmith/models/attention.py",
        "return gated_delta_rule_anew(query, key, value, decay, beta, self.lengths)",
        "return gated_delta_rule_anew(query, key, value, decay, beta, (len(query),))",
        (PEFT,),
    ),
    Mutation(
        "the gradient of a delta net's state goes to the neighbouring sequence",
        "tinsmith/kernels/delta_chunks.py",
        "gradients[behind : behind + end - start] = earlier",
        "gradients[behind : behind + end - start] = earlier.roll(heads, 0)",
        ("tests/models/test_delta_rule.py",),
    ),
    Mutation(
        "positions do not begin anew with each sequence",
        "tinsmith/rendering/packing.py",
        "positions=upload(torch.cat([s.positions for s in sequences], dim=1).numpy(), device),",
        "positions=upload(torch.cat([s.positions for s in sequences], dim=1).numpy()"
        " + np.repeat(np.cumsum([0, *lengths[:-1]]), lengths), device),",
        ("tests/rendering/test_renderer.py",),
    ),
    # ---- Images
    Mutation(
        "height and width of M-RoPE positions are swapped",
        "tinsmith/models/families.py",
        "return grid.reshape(3, -1) + start",
        "return grid.reshape(3, -1)[[0, 2, 1]] + start",
        ("tests/models/test_families.py",),
    ),
    Mutation(
        "height and width turn each other's pairs in M-RoPE",
        "tinsmith/models/read_decoder.py",
        "axes[row : 3 * sections[row] : 3] = row",
        "axes[row : 3 * sections[row] : 3] = 3 - row",
        ("tests/models/test_decoder.py", PEFT),
    ),
    Mutation(
        "features of images are placed one token late",
        "tinsmith/rendering/packing.py",
        "image_index=upload(np.flatnonzero(in_images), device),",
        "image_index=upload(np.flatnonzero(in_images) + 1, device),",
        (PEFT,),
    ),
    Mutation(
        "images of a row are swapped",
        "tinsmith/models/base.py",
        "features = self.image_features(row.images)",
        "features = self.image_features(row.images[::-1])",
        (BACKEND, PEFT),
    ),
    Mutation(
        "pixel values are not normalised",
        "tinsmith/models/vision_tower.py",
        "values.append(levels.values(row.to(self.device, non_blocking=True), self.dtype))",
        "values.append(levels.values(row.to(self.device, non_blocking=True), self.dtype) * 0.5 + 0.5)",
        ("tests/models/test_vision_tower.py",),
    ),
    # ---- What is sampled
    Mutation(
        "a snapshot follows the weights that are trained on",
        "tinsmith/models/lora.py",
        "replace(self, flat=self.flat.clone(), ref=ref)",
        "replace(self, ref=ref)",
        (f"{OPTIMIZER}::test_a_snapshot_does_not_follow",),
    ),
    Mutation(
        "a stale snapshot is sampled after newer weights were published",
        "tinsmith/worker/snapshots.py",
        "self._keep(key, Snapshot(weights))",
        "self._keep(key, self.held.get(key) or Snapshot(weights))",
        ("tests/worker/test_snapshots.py",),
    ),
    Mutation(
        "passes in half precision read the weights of before the step",
        "tinsmith/models/lora.py",
        "if self.flat_working.dtype != self.flat.dtype:\n            self.flat_working.copy_(self.flat)",
        "return",
        ("tests/models/test_layout.py", OPTIMIZER),
    ),
    Mutation(
        "the prefix cache is shared between weights",
        "tinsmith/sampling/prefix.py",
        'f"{tenant}\\n{ref.key}".encode()',
        "tenant.encode()",
        (f"{SAMPLER}::test_nothing_is_shared_between_weights",),
    ),
    Mutation(
        "the prefix cache is shared between tenants",
        "tinsmith/sampling/prefix.py",
        'f"{tenant}\\n{ref.key}".encode()',
        "ref.key.encode()",
        (f"{SAMPLER}::test_a_tenant_finds_nothing_of_what_others_have_computed",),
    ),
    Mutation(
        "training follows experts that another tenant's samples were computed by",
        "tinsmith/engine/records.py",
        "if store.tenant_of(ids.session_of(question.run)) == question.tenant:",
        "if question.tenant:",
        ("tests/protocol/test_questions.py::test_experts_are_kept_and_found_by_the_engine_with_all_their_bits",),
    ),
    Mutation(
        "a tenant goes on with a checkpoint that another has withdrawn",
        "tinsmith/server/routes/sampling.py",
        "if session.model_path is not None and caller_of(request).sees is not None:",
        "if False:",
        ("tests/server/test_tenants.py::test_others_read_what_is_published_and_change_it_no_more_than_before",),
    ),
    Mutation(
        "the prefix cache is shared between images of one size",
        "tinsmith/sampling/prefix.py",
        'image.sha256 + struct.pack("<q", span.offset - start)',
        'struct.pack("<q", span.offset - start)',
        (f"{SAMPLER}::test_images_are_told_apart_by_content_and_from_text_of_the_same_ids",),
    ),
    Mutation(
        "a token's log-probability is that of temperature 1",
        "tinsmith/sampling/choose.py",
        "return tokens, logprobs.gather(1, tokens.unsqueeze(1)).squeeze(1)",
        "return tokens, logits.log_softmax(-1).gather(1, tokens.unsqueeze(1)).squeeze(1)",
        (CHOOSE,),
    ),
    Mutation(
        "top_p keeps one token too few",
        "tinsmith/sampling/choose.py",
        "fewer = (missing + of_tie - 1) // of_tie",
        "fewer = missing // of_tie",
        (CHOOSE,),
    ),
    Mutation(
        "top_k keeps one token too many",
        "tinsmith/sampling/choose.py",
        "k = torch.where(top_k > 0, top_k, vocabulary)",
        "k = torch.where(top_k > 0, top_k + 1, vocabulary)",
        (CHOOSE,),
    ),
    Mutation(
        "a stop string across two tokens is overlooked",
        "tinsmith/sampling/stopping.py",
        "self.strings.read(self.matched, self.text.add(token))",
        "self.strings.read(0, self.text.add(token))",
        ("tests/sampling/test_stopping.py",),
    ),
    Mutation(
        "the tokens of a stream come behind its end, where nobody reads them",
        "tinsmith/worker/samples.py",
        "        if tokens:  # before what ends their samples: nobody reads tokens that come behind it\n"
        "            self.send(SampleEvents(tokens))\n"
        "        for event in outcomes:",
        "        later = partial(self.send, SampleEvents(tokens)) if tokens else lambda: None\n"
        "        outcomes = sorted(outcomes, key=lambda event: isinstance(event, TokensSampled))\n"
        "        for event in outcomes:\n"
        "            if isinstance(event, TokensSampled):\n"
        "                later()",
        ("tests/worker/test_samples.py::test_a_stream_is_told_its_tokens_in_one_message_a_step",),
    ),
    Mutation(
        "a live model's newest weights are those of its last checkpoint",
        "tinsmith/store/newest_weights.py",
        "if snapshot is not None:",
        "if snapshot is None:",
        ("tests/server/test_applications.py::test_the_newest_weights_are_those_that_were_saved_last",),
    ),
    Mutation(
        "an application samples another tenant's checkpoint",
        "tinsmith/server/sample_start.py",
        'await require(request, "readable checkpoint", path)',
        "pass",
        ("tests/server/test_tenants.py::test_a_foreign_id_is_answered_as_one_that_does_not_exist_by_every_route",),
    ),
    Mutation(
        "an application samples another tenant's live run",
        "tinsmith/server/sample_start.py",
        'await require(request, "model", model_id)',
        "pass",
        ("tests/server/test_tenants.py::test_a_foreign_id_is_answered_as_one_that_does_not_exist_by_every_route",),
    ),
    Mutation(
        "an application that leaves before the end has used nothing",
        "tinsmith/server/calls.py",
        "if told := sample.streamed_tokens:",
        "if told := 0:",
        ("tests/server/test_applications.py::test_what_a_client_was_told_before_it_went_away_is_metered",),
    ),
    Mutation(
        "a sample goes on when the application that asked for it has gone",
        "tinsmith/server/calls.py",
        "cancelling = asyncio.ensure_future(hub.engine.notify(CancelSample(request_id, sample.run)))",
        "cancelling = asyncio.ensure_future(asyncio.sleep(0))",
        ("tests/server/test_applications.py::test_a_request_that_is_given_up_cancels_its_sample",),
    ),
    Mutation(
        "penalties count a token once, however often it came",
        "tinsmith/sampling/shaping.py",
        "self._counts[place] += 1",
        "self._counts[place] = 1",
        ("tests/sampling/test_shaping.py::test_tokens_are_counted_once_however_often_they_are_looked_at",),
    ),
    Mutation(
        "a grammar that is asked for leaves out nothing",
        "tinsmith/sampling/shaping.py",
        "return logits.masked_fill(~allowed[:, : logits.shape[1]], -torch.inf)",
        "return logits",
        ("tests/acceptance/test_openai.py::test_an_answer_is_json_of_the_format_that_is_asked_for",),
    ),
    Mutation(
        "the token that ends an answer is cut off",
        "tinsmith/sampling/local/sequence.py",
        'return SampledSequence(self.tokens, self.logprobs, self.reason or "length", top, versions)',
        'keep = len(self.tokens) - (self.reason == "stop")\n'
        '        return SampledSequence(self.tokens[:keep], self.logprobs[:keep], self.reason or "length", top, '
        "versions)",
        (f"{SAMPLER}::test_stop_rules",),
    ),
    Mutation(
        "what a seed gives depends on what runs beside",
        "tinsmith/sampling/local/prompt_pass.py",
        "[s.choice() for s in growing]",
        "[s.choice()._replace(seed=s.job.seed + place) for place, s in enumerate(growing)]",
        ("tests/sampling/local/test_decoding.py::test_each_gets_what_it_would_get_alone",),
    ),
    Mutation(
        "the samples of a request share their random numbers",
        "tinsmith/sampling/choose.py",
        "state = _mix(state ^ _mix(samples + _signed(2 * _GAMMA)))",
        "state = _mix(state ^ _mix(samples * 0 + _signed(2 * _GAMMA)))",
        (CHOOSE,),
    ),
    Mutation(
        "an answer's positions begin one too far behind its prompt",
        "tinsmith/rendering/rendered.py",
        "return int(self.positions.max()) + 1",
        "return int(self.positions.max()) + 2",
        ("tests/models/test_families.py",),
    ),
    Mutation(
        "positions of an answer are one too far while it is decoded",
        "tinsmith/sampling/local/device_batch.py",
        "row[POSITION] = job.rendered.next_position - len(job.rendered) - 1",
        "row[POSITION] = job.rendered.next_position - len(job.rendered)",
        (f"{SAMPLER}::test_logprobs_equal_the_trainers_for_many_weights_in_one_batch",),
    ),
    Mutation(
        "prompt log-probabilities are those of the token before",
        "tinsmith/sampling/prompt_scores.py",
        "ids = torch.from_numpy(self.token_ids[where]).to(logits.device, torch.int64)",
        "ids = torch.from_numpy(self.token_ids[where - 1]).to(logits.device, torch.int64)",
        ("tests/sampling/test_prompt_scores.py",),
    ),
    # ---- The optimizer
    Mutation(
        "AdamW corrects no bias",
        "tinsmith/training/optimizer.py",
        "        self.adamw.step()",
        (
            '        for state in self.adamw.state.values():\n            state["step"].clamp_(min=10**6)\n        '
            "self.adamw.step()"
        ),
        (OPTIMIZER,),
    ),
    Mutation(
        "vectors, such as norms, are not decayed",
        "tinsmith/training/optimizer.py",
        "        self.adamw.step()\n",
        "        self.adamw.step()\n        for buffer in self.weights.buffers():\n            if buffer.ndim < 2:\n"
        "                buffer.data.div_(1 - settings.lr * settings.weight_decay)\n",
        (OPTIMIZER, f"{PEFT}::test_steps_equal_transformers_with_adamw"),
    ),
    Mutation(
        "gradients are clipped tensor by tensor",
        "tinsmith/training/optimizer.py",
        "clip_grads_with_norm_(buffers, settings.grad_clip_norm, total_norm)",
        "for part in self.weights.cut(totals):\n"
        "                    part.mul_(min(1.0, settings.grad_clip_norm / (part.norm().item() + 1e-6)))",
        (OPTIMIZER,),
    ),
    Mutation(
        "AdamW's moments are not saved",
        "tinsmith/training/backend.py",
        "SavedState(about, masters, model.copied_moments() if optimizer else None)",
        "SavedState(about, masters, {} if optimizer else None)",
        (CHECKPOINT,),
    ),
    Mutation(
        "AdamW's count of steps is not restored",
        "tinsmith/training/optimizer.py",
        "            places[name].copy_(value)",
        '            if not name.endswith(".step"):\n                places[name].copy_(value)',
        (CHECKPOINT, OPTIMIZER),
    ),
    # ---- Losses
    Mutation(
        "the ratio of ppo is inverted",
        "tinsmith/training/losses.py",
        'return _surrogate(_clipped(logprobs - inputs["logprobs"], inputs, config), inputs["advantages"])',
        'return _surrogate(_clipped(inputs["logprobs"] - logprobs, inputs, config), inputs["advantages"])',
        (LOSSES,),
    ),
    Mutation(
        "a token gets the advantage of its neighbour",
        "tinsmith/training/losses.py",
        'return _surrogate(logprobs - inputs["logprobs"], inputs["advantages"])',
        'return _surrogate(logprobs - inputs["logprobs"], inputs["advantages"].roll(1, 0))',
        (LOSSES,),
    ),
    Mutation(
        "a datum gets the advantages of another in its row",
        "tinsmith/training/losses.py",
        "name: np.concatenate([datum.loss_inputs[name].reshape(len(datum.rendered), width) for datum in datums])",
        "name: np.concatenate([datum.loss_inputs[name].reshape(len(datum.rendered), width) for datum in datums[::-1]])",
        (BACKEND,),
    ),
    Mutation(
        "the mask of dro is ignored",
        "tinsmith/training/losses.py",
        "return torch.stack(given).all(dim=0)",
        "return torch.ones_like(given[0])",
        (LOSSES,),
    ),
    Mutation(
        "the ratio of gspo takes in the prompt",
        "tinsmith/training/losses.py",
        'counted = inputs["sequence_ratio_mask"] != 0',
        'counted = inputs["sequence_ratio_mask"] >= 0',
        (LOSSES,),
    ),
    # ---- Checkpoints and exports
    Mutation(
        "a checkpoint of other base weights is loaded",
        "tinsmith/training/checkpoint.py",
        'check_fingerprint(about.base_fingerprint, base.fingerprint, base.name, "the checkpoint")',
        'check_fingerprint(base.fingerprint, base.fingerprint, base.name, "the checkpoint")',
        ("tests/engine/test_checkpoints.py",),
    ),
    Mutation(
        "B is exported transposed",
        "tinsmith/training/peft_format.py",
        'lora_B.weight"] = layer.pair.b.contiguous()',
        'lora_B.weight"] = layer.pair.b.t().reshape(layer.pair.b.shape).contiguous()',
        (EXPORT,),
    ),
    Mutation(
        "B of experts is exported expert by expert",
        "tinsmith/training/peft_experts.py",
        "b.permute(1, 2, 0).flatten(1)",
        "b.permute(1, 0, 2).flatten(1)",
        (EXPORT,),
    ),
    Mutation(
        "up reads what gate's A gives",
        "tinsmith/training/peft_experts.py",
        "of_up[..., rank:] = up.b",
        "of_up[..., :rank] = up.b",
        (EXPORT,),
    ),
    Mutation(
        "experts are merged with gate and up exchanged",
        "tinsmith/training/peft_format.py",
        "gate_and_up(kind, matrices)[PARTS.index(part)]",
        "gate_and_up(kind, matrices)[1 - PARTS.index(part)]",
        (EXPORT,),
    ),
    Mutation(
        "experts are merged with their adapters unscaled",
        "tinsmith/training/peft_format.py",
        "weight.copy_(weight.float() + adapter.scale * (own_b @ own_a))",
        "weight.copy_(weight.float() + own_b @ own_a)",
        (EXPORT,),
    ),
    Mutation(
        "merged experts are not transposed as the files of their base",
        "tinsmith/training/peft_format.py",
        "    _lay_out_as(stored, network)\n",
        "",
        (EXPORT,),
    ),
    Mutation(
        "experts with adapters of their own are read as the first",
        "tinsmith/training/peft_experts.py",
        "if not torch.equal(common, common[:1].expand_as(common)):",
        "if False:",
        (EXPORT,),
    ),
    Mutation(
        "the scale of an adapted parameter is that of a layer",
        "tinsmith/training/peft_config.py",
        "alpha = _of_layer(self._known_as(name), self.alphas, self.alpha)",
        "alpha = _of_layer(name, self.alphas, self.alpha)",
        (EXPORT,),
    ),
    Mutation(
        "full weights of a checkpoint stay where its file lies in memory",
        "tinsmith/training/checkpoint.py",
        'copy=base.device.type == "cpu"',
        "copy=False",
        ("tests/training/test_checkpoint.py::test_training_goes_on_exactly",),
    ),
    Mutation(
        "an adapter is merged without its scale",
        "tinsmith/training/peft_format.py",
        "weight.copy_(weight.float() + adapter.scale * (pair.b @ pair.a))",
        "weight.copy_(weight.float() + pair.b @ pair.a)",
        (EXPORT,),
    ),
    # ---- Several workers
    Mutation(
        "the gradients of one worker are left out of the sum",
        "tinsmith/training/parallel/all_reduce.py",
        "            group.all_reduce(wide)",
        "            wide.mul_(float(group.place.rank != 1))\n            group.all_reduce(wide)",
        ("tests/distributed/test_all_reduce.py::test_a_step_of_all_is_that_of_one_that_was_given_all_gradients",),
    ),
    Mutation(
        "a datum is computed by two workers",
        "tinsmith/engine/shares.py",
        "shares[rank].append(place)",
        "shares[rank].append(place)\n        shares[0].append(place)",
        ("tests/engine/test_shares.py",),
    ),
    Mutation(
        "parts of sharded weights are put together by the wrong rank",
        "tinsmith/training/parallel/sharded_weights.py",
        "row.read(stretch, rank * row.part + start, wanted)",
        "row.read(stretch, (rank + 1) % group.count * row.part + start, wanted)",
        ("tests/distributed/test_sharded.py::test_checkpoints_go_on_whatever_the_number_of_workers",),
    ),
    # ---- Operations
    Mutation(
        "a command that is read twice runs twice",
        "tinsmith/store/commands.py",
        'commands.c.model_id == bindparam("model"), _IS_NEW',
        'commands.c.model_id == bindparam("model"), _IS_NEW | (commands.c.seq_id >= 0)',
        ("tests/store/test_commands.py",),
    ),
    Mutation(
        "a power cut takes operations and outcomes that clients were told of",
        "tinsmith/store/sqlite.py",
        '"synchronous=FULL"',
        '"synchronous=NORMAL"',
        ("tests/engine/test_power_loss.py",),
    ),
    Mutation(
        "an engine waits while its server writes one transaction behind the other",
        "tinsmith/store/sqlite.py",
        "_LOOKS_S = 0.0005",
        "_LOOKS_S = 0.1",
        ("tests/store/test_store.py",),
    ),
    Mutation(
        "the event loop waits for the disk while the journal of samples is shortened",
        "tinsmith/server/sample_journal.py",
        "await asyncio.to_thread(self._file.rewriting(self._records()))",
        "self._file.rewriting(self._records())()",
        ("tests/server/test_sampling.py",),
    ),
    Mutation(
        "a kept copy has its name before its content is on the disk",
        "tinsmith/worker/kept_copies.py",
        "put_in_place(writing, directory)",
        "writing.rename(directory)",
        ("tests/engine/test_power_loss.py",),
    ),
    Mutation(
        "a row needs an image that is not on the disk",
        "tinsmith/store/blobs.py",
        "                sync_all(begun)\n",
        "",
        ("tests/store/test_blobs.py",),
    ),
    Mutation(
        "what samples have used is added again when nobody knows what a commit came to",
        "tinsmith/store/usage.py",
        "where=last_commits.c.number < _NOTE.excluded.number",
        "where=last_commits.c.number <= _NOTE.excluded.number",
        ("tests/server/test_budgets.py",),
    ),
    Mutation(
        "an engine writes on when its successor has been started",
        "tinsmith/store/fence.py",
        "newest is None or newest[0] != number",
        "newest is None",
        ("tests/store/test_lease.py",),
    ),
    Mutation(
        "transactions of PostgreSQL that write do not follow one another",
        "tinsmith/store/postgresql.py",
        "SELECT pg_advisory_xact_lock({WRITERS})",
        "SELECT pg_try_advisory_xact_lock({WRITERS})",
        ("tests/store/test_lease.py",),
    ),
    Mutation(
        "a commit whose answer was lost counts as one that failed",
        "tinsmith/store/postgresql.py",
        "return bool(connection.exec_driver_sql(_IS_COMMITTED, note).scalar())",
        "return False",
        ("tests/store/test_postgresql.py",),
    ),
    Mutation(
        "a second outcome of an operation replaces the one that was acknowledged",
        "tinsmith/store/commands.py",
        (
            'commands.c.model_id == bindparam("model"), commands.c.seq_id == bindparam("seq"), '
            'commands.c.status == "queued"'
        ),
        'commands.c.model_id == bindparam("model"), commands.c.seq_id == bindparam("seq")',
        ("tests/store/test_commands.py",),
    ),
    Mutation(
        "a step that was under way when its worker was killed is taken twice",
        "tinsmith/engine/operations.py",
        '        metrics = (yield call)["metrics"]\n'
        '        self.copies.stepped(model, call, command.seq_id, metrics["grad_norm"], sent_at)\n',
        "        self.copies.stepped(model, call, command.seq_id, 0.0, sent_at)\n"
        '        metrics = (yield call)["metrics"]\n',
        (RECOVERY,),
    ),
    Mutation(
        "a step is taken without the gradients that a killed worker had",
        "tinsmith/engine/replay.py",
        "                case Passed():\n",
        "                case Passed() if event.state < model.history.state:\n",
        (RECOVERY,),
    ),
    Mutation(
        "gradients of a pass that was computed in part before a worker was killed count twice",
        "tinsmith/engine/forward_work.py",
        "for place, operation in enumerate(left, 1) if operation.has_results), default=0)",
        "for place, operation in enumerate(left, 1) if operation.is_complete), default=0)",
        (RECOVERY,),
    ),
    Mutation(
        "gradients of an operation that a killed engine had computed in part count twice",
        "tinsmith/engine/journal.py",
        "        if seq <= begun and command.kind",
        "        if seq < begun and command.kind",
        (ENGINE_DEATH,),
    ),
    Mutation(
        "an outcome is recorded without what it has changed in its model",
        "tinsmith/store/commands.py",
        "elif recording.finish(outcome) and outcome.history is not None:",
        "elif recording.finish(outcome) and outcome.history is not None and outcome.error is None:",
        (ENGINE_DEATH, "tests/engine/test_journal.py"),
    ),
    Mutation(
        "gradients are lost that were computed while a server stopped that was killed then",
        "tinsmith/engine/copies.py",
        "            if model is None or model.spoiled:  # these gradients",
        "            if model is None or model.spoiled or self.models[model_id].ending:  # these gradients",
        (ENGINE_DEATH,),
    ),
    Mutation(
        "while the database is locked, copies take the place of those that it knows",
        "tinsmith/engine/copies.py",
        "        if self.recorder.waiting:  # the next",
        "        if self.recorder.is_full:  # the next",
        (ENGINE_DEATH,),
    ),
    Mutation(
        "a save that a killed engine had finished is refused when it is run again",
        "tinsmith/engine/checkpoints.py",
        "        if saved is not None:\n",
        "        if saved is not None and overwrite:\n",
        (ENGINE_DEATH,),
    ),
    Mutation(
        "engines that ended before they began anything count against operations",
        "tinsmith/store/histories.py",
        ".where(engine_starts.c.has_begun, since)",
        ".where(since)",
        (f"{ENGINE_DEATH}::test_operations_fail_before_which_engines_end_again_and_again",),
    ),
    Mutation(
        "a server that is stopped counts against the models that it brings back",
        "tinsmith/engine/loop.py",
        "        scheduler.crash_recovery.stop()\n",
        "",
        (f"{ENGINE_DEATH}::test_a_model_is_not_lost_because_a_server_is_stopped_again_and_again_while_it_comes_back",),
    ),
    Mutation(
        "an operation may end engines again and again at the cost of another model that comes back",
        "tinsmith/engine/crash_recovery.py",
        "        return any(self.waiting.values())\n",
        "        return False\n",
        (f"{ENGINE_DEATH}::test_a_model_is_not_lost_because_an_operation_of_another_ends_engines",),
    ),
    Mutation(
        "nobody ends a stopped parser",
        "tinsmith/server/parser_process.py",
        "        if self._process is not None and is_stopped(",
        "        if self._process is None and is_stopped(",
        ("tests/server/test_parser_process.py",),
    ),
    Mutation(
        "a stopped worker outlives its engine",
        "tinsmith/protocol/child_process.py",
        "ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)",
        "ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 0)",
        ("tests/protocol/test_child_process.py",),
    ),
    Mutation(
        "a step whose passes were given up is replayed without them",
        "tinsmith/engine/history.py",
        "        if self.open_is_given_up:  # no state before it leads to this one",
        "        if False:",
        (RECOVERY,),
    ),
    Mutation(
        "gradients whose passes were given up are lost without a word when workers end",
        "tinsmith/engine/crash_recovery.py",
        "            if model.history.open_is_given_up:",
        "            if False:",
        (RECOVERY,),
    ),
    Mutation(
        "requests that a replay needs are dropped with the newest copy",
        "tinsmith/engine/history.py",
        "return needed[0].mark if needed",
        "return needed[-1].mark if needed",
        (RECOVERY,),
    ),
    Mutation(
        "a save that was cut short is done again of the state behind the steps beside it",
        "tinsmith/engine/copies.py",
        "if state.saving is not None or not self.are_made_of",
        "if not self.are_made_of",
        ("tests/engine/test_saves.py",),
    ),
    Mutation(
        "a step is taken though an operation before it failed",
        "tinsmith/engine/operations.py",
        "if model.spoiled:\n",
        "if False:\n",
        ("tests/engine/test_scheduler.py",),
    ),
    Mutation(
        "a client gives up the samples of another session",
        "tinsmith/wire/service_requests.py",
        "for each in dict.fromkeys(asked.retrieved_request_ids) if each.startswith(prefix)",
        "for each in dict.fromkeys(asked.retrieved_request_ids)",
        ("tests/server/test_sampling.py::test_a_client_gives_up_only_samples_of_its_own_session",),
    ),
    Mutation(
        "a sequence that another session sampled is trained on",
        "tinsmith/worker/provenance.py",
        "return {sequence_id for sequence_id in named if ids.session_of(sequence_id) == ids.session_of(model_id)}",
        "return named",
        ("tests/worker/test_provenance.py",),
    ),
    # ---- What vLLM servers sample from
    Mutation(
        "whatever a vLLM server computes for the canary is good enough",
        "tinsmith/sampling/vllm/verify.py",
        "if not difference <= expected.limit:",
        "if False:",
        ("tests/sampling/vllm/test_verify.py::test_slightly_wrong_weights_are_refused",),
    ),
    Mutation(
        "a sample of the full weights before is returned as one of the new",
        "tinsmith/sampling/vllm/protocol.py",
        "if label is not None and tokens and versions != {label}:",
        "if False:",
        ("tests/sampling/vllm/test_protocol.py",),
    ),
    Mutation(
        "a sample of another adapter is returned",
        "tinsmith/sampling/vllm/generate.py",
        'if body["model"] is not None and reply["model"] not in (body["model"], None):',
        "if False:",
        ("tests/sampling/vllm/test_publisher.py",),
    ),
    Mutation(
        "a vLLM server goes on with keys and values of the full weights before",
        "tinsmith/sampling/vllm/loader.py",
        '        await post("/reset_prefix_cache", reset_running_requests="true")\n',
        "",
        ("tests/sampling/vllm/test_publisher.py",),
    ),
    Mutation(
        "an adapter is written for vLLM with half of its scale",
        "tinsmith/sampling/vllm/weights.py",
        "write_adapter(pairs, adapter.shape.rank, names",
        "write_adapter(pairs, 2 * adapter.shape.rank, names",
        ("tests/sampling/vllm/test_verify.py::test_an_adapter_is_written_as_passes_read_it",),
    ),
    Mutation(
        "an adapter is merged for vLLM without its scale",
        "tinsmith/sampling/vllm/weights.py",
        "part.copy_(part.float() + adapter.scale * (pair.b.float() @ pair.a.float()))",
        "part.copy_(part.float() + pair.b.float() @ pair.a.float())",
        ("tests/sampling/vllm/test_verify.py::test_merged_weights_compute_what_an_adapter_does",),
    ),
    Mutation(
        "vLLM answers log-probabilities of another temperature",
        "tinsmith/sampling/vllm/launch.py",
        '"processed_logprobs"',
        '"raw_logprobs"',
        ("tests/sampling/vllm/test_launch.py",),
    ),
    Mutation(
        "every tenant owns all sessions",
        "tinsmith/store/sessions.py",
        'return or_(owner == bindparam("tenant"), bindparam("tenant", type_=Text).is_(None))',
        'return or_(owner != bindparam("tenant"), owner == bindparam("tenant"), bindparam("tenant").is_(None))',
        ("tests/server/test_tenants.py",),
    ),
    Mutation(
        "a key is known by the part that is no secret",
        "tinsmith/store/keys.py",
        "return key if is_right else None",
        "return key if is_right or text else None",
        ("tests/server/test_tenants.py", "tests/commands/test_keys.py"),
    ),
    Mutation(
        "who may read a published checkpoint may change it",
        "tinsmith/server/access.py",
        'return named == "readable checkpoint" and (',
        "return bool(named) and (",
        ("tests/server/test_tenants.py",),
    ),
    Mutation(
        "a tenant has as many parts of the passes as it has models",
        "tinsmith/engine/passes.py",
        "of_tenants.setdefault(tenant_of(each[1].command.model_id), [])",
        'of_tenants.setdefault("", [])',
        ("tests/engine/test_passes.py",),
    ),
    Mutation(
        "a deleted checkpoint is found as if it were there",
        "tinsmith/store/checkpoints.py",
        "ALIVE = and_(_UNEXPIRED, checkpoints.c.deleted_at.is_(None))",
        "ALIVE = _UNEXPIRED",
        ("tests/server/test_checkpoints.py",),
    ),
    Mutation(
        "what is kept of an ended session displaces the save of its client",
        "tinsmith/engine/checkpoints.py",
        "kept = None if path.name == SESSION_END else allowed.kept_checkpoints",
        "kept = allowed.kept_checkpoints",
        ("tests/engine/test_saves.py",),
    ),
    Mutation(
        "files of a checkpoint that can be restored are deleted",
        "tinsmith/store/checkpoints.py",
        "_GONE = or_(checkpoints.c.expires_at <= _NOW, checkpoints.c.deleted_at <= _NOW - RECOVERABLE_S)",
        "_GONE = or_(checkpoints.c.expires_at <= _NOW, checkpoints.c.deleted_at <= _NOW)",
        ("tests/store/test_sweep.py",),
    ),
    Mutation(
        "tenants take turns of passes, however long theirs are",
        "tinsmith/engine/passes.py",
        "self._had[tenant] = self._had.get(tenant, self._least) + seconds",
        "self._had[tenant] = self._had.get(tenant, self._least)",
        ("tests/engine/test_passes.py",),
    ),
    Mutation(
        "a tenant whose passes fail has them for nothing",
        "tinsmith/engine/passes.py",
        "return self._had.get(tenant, self._least) + sum(getting)",
        "return self._had.get(tenant, self._least)",
        ("tests/engine/test_passes.py",),
    ),
    Mutation(
        "a tenant that comes is owed all that others had before",
        "tinsmith/engine/passes.py",
        "self._had.setdefault(tenant, self._least)",
        "self._had.setdefault(tenant, 0.0)",
        ("tests/engine/test_passes.py",),
    ),
    Mutation(
        "a budget forgets what is under way",
        "tinsmith/server/budgets.py",
        "used.tokens + reserved + tokens > key.tokens_a_day",
        "used.tokens + tokens > key.tokens_a_day",
        ("tests/server/test_budgets.py",),
    ),
    Mutation(
        "what is used later in an hour takes the place of what was used before",
        "tinsmith/store/usage.py",
        "column + _INSERT.excluded[column.name]",
        "_INSERT.excluded[column.name]",
        ("tests/server/test_budgets.py",),
    ),
    Mutation(
        "a client of a proxy is here if it says so",
        "tinsmith/server/front.py",
        "if client is None or server is None or any(name in request.headers for name in _OF_PROXIES):",
        "if client is None or server is None:",
        ("tests/server/test_metrics.py",),
    ),
    Mutation(
        "a sample that cannot be recorded counts as finished too",
        "tinsmith/worker/samples.py",
        "                self._record(result, started)\n",
        "                self._record(result, started)\n                self._count(started.message, result, 0)\n",
        ("tests/worker/test_samples.py",),
    ),
    Mutation(
        "an error of the hub is lost on its way to an HTTP server",
        "tinsmith/server/calling.py",
        "waiting.set_exception(error)",
        "waiting.set_result(None)",
        ("tests/server/test_calling.py",),
    ),
    Mutation(
        "what an ended HTTP server waited for waits on",
        "tinsmith/server/calling.py",
        "            waiting.cancel()\n",
        "            pass\n",
        ("tests/server/test_calling.py",),
    ),
    Mutation(
        "an HTTP server outlives its hub and keeps the port",
        "tinsmith/server/http_process.py",
        "ending = asyncio.create_task(end_with_hub())",
        "ending = asyncio.create_task(asyncio.Event().wait())",
        ("tests/acceptance/test_http_servers.py::test_http_servers_outlive_the_engine_and_end_with_the_server",),
    ),
    Mutation(
        "metrics are told to other machines",
        "tinsmith/server/routes/metrics.py",
        "if not (request.app.state.is_for_metrics or comes_from_here(request)):",
        "if False:",
        ("tests/server/test_metrics.py",),
    ),
    Mutation(
        "an error of counting ends the thread without a word",
        "tinsmith/protocol/reports.py",
        "with reported(Exception, _log_end):",
        "with suppress(Exception):",
        ("tests/protocol/test_reports.py",),
    ),
    Mutation(
        "the numbers of a model that is gone stay",
        "tinsmith/server/activity.py",
        'if each[0] != OF_MODEL or each[1]["model"] in loaded]',
        "]",
        ("tests/server/test_metrics.py",),
    ),
)


def stale(mutations: Iterable[Mutation] = MUTATIONS) -> list[str]:
    """What is wrong with the patches: one whose text does not stand once in its file, or that is no Python, tests that
    are not there."""
    wrong = []
    for mutation in mutations:
        text = (ROOT / mutation.path).read_text(encoding="utf-8")
        if (count := text.count(mutation.old)) != 1:
            wrong.append(f"{mutation.name}: its text stands {count} times in {mutation.path}, not once")
            continue
        try:
            compile(text.replace(mutation.old, mutation.new), mutation.path, "exec")
        except SyntaxError as error:
            wrong.append(f"{mutation.name}: {mutation.path} is no Python any more: {error}")
        for test in mutation.tests:
            file, _, function = test.partition("::")
            if not (ROOT / file).is_file() or f"def {function}" not in (ROOT / file).read_text(encoding="utf-8"):
                wrong.append(f"{mutation.name}: {test} is not there")
    return wrong


# ---- A copy and its tests


def copy_repository(directory: Path) -> None:
    """Copy product and tests, as they are in the working tree; what else tests read is linked."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "tinsmith", "rl", "tests"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    for name in listed.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, directory / name)
    for other in ROOT.iterdir():
        if not other.name.startswith(".") and not (directory / other.name).exists():
            (directory / other.name).symlink_to(other)


class Recorder:
    """A plugin of pytest that notes the first test that fails, and errors that say nothing of what is tested."""

    def __init__(self) -> None:
        self.failed: str | None = None
        self.error = ""
        self.no_verdict: str | None = None

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid

    def pytest_exception_interact(self, call: Any) -> None:
        error = call.excinfo.value
        self.error = self.error or type(error).__name__
        if isinstance(error, ImportError | SyntaxError | NameError) and self.no_verdict is None:
            self.no_verdict = f"{type(error).__name__}: {error}"


def _run_tests(directory: Path, tests: Sequence[str], first_only: bool) -> None:
    """In a forked process: run tests of the copy in `directory`, and write what they came to into `result.json` beside
    it."""
    os.setsid()
    copy = directory / "copy"
    output = os.open(directory / "output", os.O_WRONLY | os.O_CREAT)
    for number in (1, 2):
        os.dup2(output, number)
    os.chdir(copy)
    os.environ |= {"PYTHONPATH": str(copy), "TMPDIR": str(directory), "PYTHONDONTWRITEBYTECODE": "1"}
    tempfile.tempdir = None
    sys.dont_write_bytecode = True
    sys.path[:] = [str(copy), *(path for path in sys.path if path not in ("", str(ROOT), str(ROOT / "tests")))]
    for name in list(sys.modules):
        if name.partition(".")[0] in ("tests", "tinsmith", "tinsmith_rl"):
            del sys.modules[name]
    import pytest

    recorder = Recorder()
    options = ["-q", "-p", "no:cacheprovider", "--basetemp", str(directory / "tests"), *(["-x"] if first_only else [])]
    code = int(pytest.main([*options, *tests], plugins=[recorder]))
    tinsmith = sys.modules.get("tinsmith")
    if tinsmith is not None and not str(tinsmith.__file__).startswith(str(copy)):
        recorder.no_verdict = f"{tinsmith.__file__} was tested, not the copy"
    failed = recorder.failed and f"{recorder.failed} ({recorder.error})"
    found = {"code": code, "failed": failed, "no_verdict": recorder.no_verdict}
    (directory / "result.json").write_text(json.dumps(found), encoding="utf-8")


class Run:
    """Tests that run in a process of their own, on a copy with a mutation or without one."""

    def __init__(self, name: str, tests: Sequence[str], mutation: Mutation | None = None) -> None:
        self.name = name
        self.tests = tests
        self.mutation = mutation

    def begin(self) -> int:
        """Make the copy, and fork the process; returns its id."""
        self.directory = Path(tempfile.mkdtemp(prefix="mutation-"))
        copy = self.directory / "copy"
        copy.mkdir()
        copy_repository(copy)
        if self.mutation is not None:
            patched = copy / self.mutation.path
            patched.write_text(
                patched.read_text(encoding="utf-8").replace(self.mutation.old, self.mutation.new), encoding="utf-8"
            )
        self.began = time.monotonic()
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _run_tests(self.directory, self.tests, first_only=self.mutation is not None)
            finally:
                os._exit(0)
        return self.pid

    @property
    def is_late(self) -> bool:
        """Whether it takes longer than it may. The baseline takes as long as it takes."""
        return self.mutation is not None and time.monotonic() - self.began > LIMIT_S

    def kill(self) -> None:
        """End its processes."""
        os.killpg(self.pid, signal.SIGKILL)

    def ended(self) -> Ended:
        """What it came to, once its process has ended; its files are deleted."""
        seconds = time.monotonic() - self.began
        result = self.directory / "result.json"
        found = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else None
        output = (self.directory / "output").read_text(encoding="utf-8", errors="replace") if found is not None else ""
        shutil.rmtree(self.directory, ignore_errors=True)
        if found is None:
            return Ended(
                "broken", seconds, "it took too long" if seconds > LIMIT_S else "its process ended without a result"
            )
        if found["code"] == 0:
            return Ended("survived", seconds, "")
        if found["code"] == 1 and found["failed"] and not found["no_verdict"]:
            return Ended("caught", seconds, found["failed"])
        return Ended(
            "broken", seconds, f"{found['no_verdict'] or 'no verdict'}, exit code {found['code']}\n{output[-2000:]}"
        )


def run_all(runs: Sequence[Run], processes: int) -> dict[str, Ended]:
    """What each of the runs came to, by name, so many at a time. Prints each as it ends."""
    waiting, running, found = list(runs), dict[int, Run](), dict[str, Ended]()
    while waiting or running:
        while waiting and len(running) < processes:
            run = waiting.pop(0)
            running[run.begin()] = run
        for pid, run in list(running.items()):
            if run.is_late:
                run.kill()
            if os.waitpid(pid, os.WNOHANG)[0]:
                del running[pid]
                ended = found[run.name] = run.ended()
                print(f"{ended.outcome:<8} {ended.seconds:6.1f} s  {run.name}  {ended.detail}", flush=True)
        time.sleep(0.05)
    return found


def baseline(mutations: Sequence[Mutation]) -> list[Run]:
    """All tests that these mutations name, on the product as it is: a run for each file."""
    files = defaultdict[str, set[str]](set)
    for mutation in mutations:
        for test in mutation.tests:
            files[test.partition("::")[0]].add(test)
    return [
        Run(f"baseline of {file}", [file] if file in tests else sorted(tests)) for file, tests in sorted(files.items())
    ]


def main() -> int:
    """Run the mutations that the command line names; 1 if one survived or is broken."""
    parser = argparse.ArgumentParser(description="Let tests find faults that are put into a copy of the product.")
    parser.add_argument("names", nargs="*", help="parts of names of mutations; all without any")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument(
        "--baseline", action="store_true", help="first run the same tests without a mutation; they must pass"
    )
    parser.add_argument("--processes", type=int, default=2, help="how many run at a time (default: 2)")
    asked = parser.parse_args()
    chosen = [each for each in MUTATIONS if not asked.names or any(part in each.name for part in asked.names)]
    if asked.list:
        print("\n".join(each.name for each in chosen))
        return 0
    if wrong := stale(chosen):
        print("\n".join(wrong))
        return 1
    began = time.monotonic()
    # Before the imports, as tests/conftest.py has it
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_WAIT_POLICY": "passive"}
    for module in PRELOADED:
        import_module(module)
    if asked.baseline:
        plain = run_all(baseline(chosen), asked.processes)
        if failing := [name for name, ended in plain.items() if ended.outcome != "survived"]:
            print("These fail without a mutation: " + ", ".join(failing))
            return 1
    found = run_all([Run(each.name, each.tests, each) for each in chosen], asked.processes)
    missed = [name for name, ended in found.items() if ended.outcome != "caught"]
    print(f"{len(found) - len(missed)} of {len(found)} mutations were caught, in {time.monotonic() - began:.0f} s")
    for name in missed:
        print(f"not caught, {found[name].outcome}: {name}")
    return 1 if missed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
