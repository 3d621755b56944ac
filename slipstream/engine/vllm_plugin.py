"""Plugin that vLLM loads in each of its processes (entry point `vllm.general_plugins`): sampler fixes and a probe.

`register` offers weight transfer to engines, and what `vllm_eager` has to those on a CPU, and installs the fixes.
`EngineProbe.check_sampler` proves at engine start that the process which samples uses a correct sampler.

vLLM has two model runners with samplers of their own. The second (V2, wherever Triton runs) derives all noise from a
request's seed and the token's position, separately for drafts, and needs no fix. The first (V1, on a CPU always) needs
two fixes:

- On a CPU, vLLM 0.32 biases every sampled speculative rollout without an error. The replacement of a Triton kernel
  fills a temporary copy, so temperature, top-k and top-p of the rejection sampler are uninitialised memory (upstream
  issue #55005).
- On all devices its drafts ignore the requests' seeds, so a rollout depends on its batch.

Both samplers of speculation also draw a random number for each token of the policy's vocabulary, which at 49,152 tokens
takes a CPU longer than the draft's pass. Here drafts draw one for each token that the draft knows, and the token in
place of a rejected one takes a single number.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from vllm.model_executor.kernels.linear.scaled_mm import cpu as scaled_mm
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform
from vllm.v1.sample import rejection_sampler
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import empty_exponential_noise_like, sample_with_exponential_noise
from vllm.v1.spec_decode import llm_base_proposer

from slipstream.engine import vllm_eager, weight_transfer
from slipstream.engine.history_drafts import History
from slipstream.engine.verification import columns_at, verify_blocks
from slipstream.engine.weight_transfer import OF_READERS, AnySlot, draft_names, slots
from slipstream.refit.channel import Location, here
from slipstream.refit.fingerprint import Turn, WeightPart, part_fingerprints

_PROPOSER: Any = llm_base_proposer.SpecDecodeBaseProposer

SHIPPED_EXPAND = rejection_sampler.expand_batch_to_tokens
"""vLLM's own function, which the fault suite restores to show that the certificate sees the bias."""

SHIPPED_DRAFTS = llm_base_proposer.compute_probs_and_sample_next_token
"""vLLM's own function, which samples all requests' drafts from one generator."""

SHIPPED_PARALLEL = _PROPOSER._sample_from_logits
"""vLLM's own method, which takes row i of drafts in parallel for a draft of request i, whose generator it gives it."""

SHIPPED_VERIFICATION = rejection_sampler.rejection_sample
"""vLLM's own function, which tests each draft token."""

_NO_TOKEN = -1  # vLLM's placeholder
_GREEDY = 1e-5  # lower temperatures are greedy, as in vLLM
_SEED = 7  # in the checks
_VOCABULARY = 4096  # in the checks; two independent samples are hardly ever equal

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of glibc's mallopt, of malloc.h


def install() -> None:
    """Install the sampler fixes; repeated calls change nothing."""
    llm_base_proposer.compute_probs_and_sample_next_token = sample_draft_tokens
    _PROPOSER._sample_from_logits = sample_from_logits
    if current_platform.is_cpu():
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens
        rejection_sampler.sample_recovered_tokens = sample_recovered_tokens


def expand_batch_to_tokens(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> torch.Tensor:
    """Repeat each request's value for each of its draft tokens.

    Args:
        x: [batch], a value for each request; entries equal to `replace_from` become `replace_to`.
        cu_num_tokens: [batch], cumulative number of draft tokens.
    Returns:
        [num_tokens].
    """
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    return torch.repeat_interleave(x, counts.long(), output_size=num_tokens)


def sample_draft_tokens(
    logits: torch.Tensor, sampling_metadata: SamplingMetadata, use_fp64_gumbel: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a draft token for each request, from the request's own generator where it has a seed.

    The rejection sampler uses the same generators for its uniforms and corrected tokens. The sampler's numbers stay
    independent of the drafts, because a generator only advances and is never copied.

    Args:
        logits: [batch, vocabulary], the draft's, -inf in the columns of tokens that it does not know; overwritten.
    Returns:
        Tokens [batch], and the draft's probabilities [batch, vocabulary].
    """
    if sampling_metadata.all_greedy:
        return logits.argmax(dim=-1), logits
    temperature = sampling_metadata.temperature
    assert temperature is not None, "vLLM knows it unless all requests are greedy"
    known = (logits[0] != -torch.inf).nonzero().view(-1)  # all, but for a draft with a vocabulary of its own
    if len(known) == logits.shape[1]:
        return _sample_tokens(logits, temperature, sampling_metadata.generators, use_fp64_gumbel)
    few, few_probs = _sample_tokens(logits[:, known], temperature, sampling_metadata.generators, use_fp64_gumbel)
    probs = torch.zeros(logits.shape, dtype=few_probs.dtype, device=logits.device)
    return known[few], probs.index_copy_(1, known, few_probs)


def sample_from_logits(
    proposer: Any, logits: torch.Tensor, sampling_metadata: SamplingMetadata
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sample drafts as vLLM does, but all rows of a request from its own generator, in the order of their places.

    Args:
        logits: [batch x places, vocabulary], request by request; a method that drafts in parallel has several places.
    """
    temperature = sampling_metadata.temperature
    if temperature is not None and len(temperature) < len(logits):
        places = len(logits) // len(temperature)
        of_rows = {
            row * places + place: generator
            for row, generator in sampling_metadata.generators.items()
            for place in range(places)
        }
        sampling_metadata = replace(sampling_metadata, generators=of_rows)
    return SHIPPED_PARALLEL(proposer, logits, sampling_metadata)


def _sample_tokens(
    logits: torch.Tensor, temperature: torch.Tensor, generators: Mapping[int, torch.Generator], use_fp64: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a column of each row by exponential noise, and return the rows' probabilities too."""
    is_greedy = temperature < _GREEDY
    logits.div_(torch.where(is_greedy, 1.0, temperature).view(-1, 1))
    probs = logits.softmax(dim=-1, dtype=torch.float32)
    noise = empty_exponential_noise_like(probs, use_fp64)
    vllm_eager.fill_with_noise(noise, generators)
    tokens = sample_with_exponential_noise(probs.clone(), noise)
    return torch.where(is_greedy, probs.argmax(dim=-1), tokens), probs


def sample_recovered_tokens(
    max_spec_len: int,
    num_draft_tokens: list[int],
    cu_num_draft_tokens: torch.Tensor,
    draft_token_ids: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_probs: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    *_: Any,
) -> torch.Tensor:
    """Sample for each draft token the token that takes its place if it is rejected.

    That token follows the positive part of policy minus draft. A request uses one of its tokens at most, that of the
    first rejection, so one uniform number serves all of its tokens.

    Args:
        num_draft_tokens: draft tokens of each request.
        draft_token_ids: [num_tokens].
        draft_probs: [num_tokens, vocabulary]; None for drafts without probabilities, whose own token is left out.
        target_probs: [num_tokens, vocabulary], the policy's.
    Returns:
        [num_tokens].
    Source:
        Leviathan et al., Fast Inference from Transformers via Speculative Decoding, arXiv 2211.17192.
    """
    if draft_probs is None:
        left = target_probs.scatter(1, draft_token_ids.long().view(-1, 1), 0.0)
    else:
        left = (target_probs - draft_probs).clamp_min_(0.0)
    del max_spec_len, cu_num_draft_tokens
    uniform = _number_of_each(num_draft_tokens, sampling_metadata.generators, left.device)
    counts = torch.tensor(num_draft_tokens, device=left.device)
    uniform = torch.repeat_interleave(uniform, counts, output_size=len(left))
    return columns_at(left, uniform).to(draft_token_ids.dtype)


def verify_in_blocks(
    draft_token_ids: torch.Tensor,
    num_draft_tokens: list[int],
    max_spec_len: int,
    cu_num_draft_tokens: torch.Tensor,
    draft_probs: torch.Tensor | None,
    target_logits: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    sampling_metadata: SamplingMetadata,
    **settings: Any,
) -> torch.Tensor:
    """Verify each request's drafts as one block where all requests sample; others as vLLM does, token by token.

    Returns:
        [batch, max_spec_len + 1] int32: accepted drafts and the token after them, then vLLM's placeholders.
    """
    if draft_probs is None or not sampling_metadata.all_random:
        given = (draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits)
        return SHIPPED_VERIFICATION(*given, bonus_token_ids, sampling_metadata, **settings)
    device, generators = target_logits.device, sampling_metadata.generators
    counts = torch.tensor(num_draft_tokens, device=device)
    accepted, after = verify_blocks(
        target_logits.softmax(dim=-1, dtype=torch.float32),
        draft_probs,
        draft_token_ids,
        counts,
        rejection_sampler.generate_uniform_probs(len(draft_token_ids), num_draft_tokens, generators, device),
        _number_of_each(num_draft_tokens, generators, device),
    )
    width = max_spec_len + 1
    tokens = torch.full((len(counts), width), _NO_TOKEN, dtype=torch.int32, device=device)
    places = torch.arange(width, device=device)
    tokens[places < counts[:, None]] = draft_token_ids.to(torch.int32)
    tokens.masked_fill_(places > accepted[:, None], _NO_TOKEN)
    after = torch.where(accepted == counts, bonus_token_ids.view(-1).long(), after).to(torch.int32)
    return tokens.scatter_(1, accepted[:, None], after[:, None])


def _number_of_each(
    num_draft_tokens: list[int], generators: Mapping[int, torch.Generator], device: torch.device
) -> torch.Tensor:
    """[batch] float64 uniform numbers, from the generators of requests that have one and drafts."""
    uniform = torch.rand(len(num_draft_tokens), dtype=torch.float64, device=device)
    numbers = uniform.view(-1, 1).unbind()  # cheaper than an index for each request
    for row, generator in generators.items():
        if num_draft_tokens[row] > 0:
            numbers[row].uniform_(generator=generator)
    return uniform


def broken_v1(device: torch.device) -> str:
    """Describe the fault of the first model runner's sampler; empty for a correct sampler.

    Drafts are sampled one place after another, and then two places in parallel.

    The expected values are worked by hand. x = [7, 0, 9] with 2, 3 and 1 draft tokens and 0 -> 1 is [7, 7, 1, 1, 1, 9].
    If all tokens are equally likely, the sampled token has the least exponential noise. The first draft uses the first
    noise of its request's generator, and the next draft uses the next noise.
    """
    x = torch.tensor([7.0, 0.0, 9.0], device=device)
    ends = torch.tensor([2, 5, 6], dtype=torch.int32, device=device)
    expanded = rejection_sampler.expand_batch_to_tokens(x, ends, 6, replace_from=0, replace_to=1).tolist()
    if expanded != [7.0, 7.0, 1.0, 1.0, 1.0, 9.0]:
        return f"expand_batch_to_tokens gave {expanded}: it loses sampling parameters"
    metadata = _two_seeded_of_three(device)
    drafts = [_drafts(metadata, 1, device)[0], _drafts(metadata, 1, device)[0], *_drafts(metadata, 2, device)]
    by_hand = torch.Generator(device=device).manual_seed(_SEED)
    for number, tokens in enumerate(drafts):
        token = int(torch.empty(_VOCABULARY, device=device).exponential_(generator=by_hand).argmin())
        if tokens[[0, 2]].tolist() != [token, token]:
            return f"draft {number} of two requests with seed {_SEED} is {tokens[[0, 2]].tolist()}, not {token}"
    accepted = rejection_sampler.generate_uniform_probs(3, [1, 1, 1], metadata.generators, device)
    uniform = float(torch.empty(1, dtype=torch.float64, device=device).uniform_(generator=by_hand))
    if accepted[[0, 2]].tolist() != [uniform, uniform]:
        return f"generate_uniform_probs gave {accepted[[0, 2]].tolist()}, not the requests' own {uniform}"
    return ""


def _drafts(metadata: SamplingMetadata, places: int, device: torch.device) -> torch.Tensor:
    """[places, 3] drafts of the first model runner for three requests, to which all tokens are equally likely."""
    proposer = SimpleNamespace(_enable_probabilistic_draft_probs=True, use_fp64_gumbel=False)
    logits = torch.zeros(3 * places, _VOCABULARY, device=device)
    return _PROPOSER._sample_from_logits(proposer, logits, metadata)[0].view(3, places).t()


def broken_v2(device: torch.device) -> str:
    """Describe the fault of the second model runner's sampler; empty for a correct sampler.

    Three requests stand at one position, two of them with the same seed. Equal seeds must give equal noise, and other
    seeds other noise. Drafts must not get the noise of the policy's samples. Logits of 6 at temperatures 0.5, 1 and 2
    are 12, 6 and 3.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.worker.gpu.sample.gumbel import apply_temperature, gumbel_sample
    from vllm.v1.worker.gpu.sample.states import SamplingStates

    states = SamplingStates(3, _VOCABULARY)
    seeds = (_SEED, _SEED, _SEED + 1)
    for row, seed in enumerate(seeds):
        states.add_request(row, SamplingParams(temperature=0.5 * 2**row, seed=seed))
    states.apply_staged_writes()
    if tuple(states.seeds.gpu[:3].tolist()) != seeds:
        return f"seeds {seeds} reach the sampler as {states.seeds.gpu[:3].tolist()}"
    rows = torch.arange(3, dtype=torch.int32, device=device)
    scaled = torch.full((3, 8), 6.0, device=device)
    apply_temperature(scaled, rows, states.temperature.gpu)
    if scaled[:, 0].tolist() != [12.0, 6.0, 3.0]:
        return f"apply_temperature gave {scaled[:, 0].tolist()}: it loses sampling parameters"
    positions = torch.full((3,), 5, dtype=torch.int64, device=device)
    sampled, drafted = (
        gumbel_sample(
            torch.zeros(3, _VOCABULARY, device=device),
            rows,
            torch.ones(3, device=device),
            states.seeds.gpu,
            positions,
            apply_temperature=False,
            is_drafting=is_drafting,
        ).tolist()
        for is_drafting in (False, True)
    )
    for tokens in (sampled, drafted):
        if tokens[0] != tokens[1] or tokens[0] == tokens[2]:
            return f"seeds {seeds} draw {tokens}: noise must follow from the seed"
    return f"drafts get the noise of the policy's draws: {sampled}" if sampled == drafted else ""


def _two_seeded_of_three(device: torch.device) -> SamplingMetadata:
    """Make three requests at temperature 1, the first and the last with generators of the same seed."""
    none = torch.empty(0, device=device)
    return SamplingMetadata(
        temperature=torch.ones(3, device=device),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={row: torch.Generator(device=device).manual_seed(_SEED) for row in (0, 2)},
        max_num_logprobs=None,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors(),
    )


def register() -> None:
    """Install the sampler fixes, the weight transfer and a CPU's own operations; repeated calls change nothing."""
    weight_transfer.register()
    if current_platform.is_cpu():
        vllm_eager.register()
        _PROPOSER.propose = vllm_eager.propose
        # Of matrices in 8 bits oneDNN's kernel serves every CPU. The one for AMX takes no float32, and adds a copy of
        # the bias that no refit reaches.
        scaled_mm.check_cpu_sgl_kernel = lambda *_: False
        keep_freed_memory()
    install()


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one; another C library goes on as it is.

    By default glibc maps a block above 32 MiB anew each time, and the system zeroes its pages: drafts of 48 rollouts
    were verified in 61 ms instead of 22, at four tokens each and a vocabulary of 49,152.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_MMAP_MAX, 0)
        libc.mallopt(_TRIM_THRESHOLD, 2**31 - 1)


class EngineProbe:
    """Methods added to vLLM's worker (`worker_extension_cls`), which the engine calls in every worker process."""

    model_runner: Any  # these are the worker's own
    vllm_config: Any
    weight_transfer_engine: Any
    device: torch.device
    use_v2_model_runner: bool
    _weight_update_active: bool

    def check_sampler(self) -> str:
        """Describe the sampler's fault in this process; empty if it honours the requests' parameters and seeds."""
        device = torch.device(current_platform.device_type)
        return broken_v2(device) if self.use_v2_model_runner else broken_v1(device)

    def verify_in_blocks(self) -> None:
        """Make the first model runner's sampler of this process verify drafts in blocks."""
        rejection_sampler.rejection_sample = verify_in_blocks

    def keep_history(self, settings: dict[str, int], stop_token_ids: tuple[int, ...]) -> None:
        """Give this rank's proposer an empty history."""
        self.model_runner.drafter.start(self.model_runner, History(**settings), stop_token_ids)

    def history(self) -> bytes:
        """Serialize the proposer's history."""
        return self.model_runner.drafter.history.to_bytes()

    def recall(self, history: bytes) -> None:
        """Let the proposer take over a history, unless it has one."""
        self.model_runner.drafter.history.read(history)

    def attention_backends(self) -> tuple[str, ...]:
        """Return vLLM's names of the attention kernels of policy and draft."""
        layers = self.vllm_config.compilation_config.static_forward_context
        attention = (layer for layer in layers.values() if isinstance(layer, AttentionLayerBase))
        return tuple(sorted({layer.get_attn_backend().get_name() for layer in attention}))

    def location(self) -> Location:
        """Return the host and the device of this rank."""
        on_gpu = self.device.type == "cuda"
        return here(str(torch.cuda.get_device_properties(self.device).uuid) if on_gpu else None)

    def received_digest(self) -> str:
        """Return the digest of the bytes in this rank's last weight update."""
        return self.weight_transfer_engine.received_digest

    def abandon_update(self) -> None:
        """End a weight update that was never finished, as vLLM could begin no other."""
        if self._weight_update_active:
            self.finish_weight_update()  # type: ignore[attr-defined]  # of the worker

    def weight_dtypes(self, is_draft: bool) -> dict[str, str]:
        """Return the types of the policy's tensors, or of the draft's, of which this rank holds a part."""
        return {part.name: part.dtype for slot in self._slots(is_draft) for part in slot.parts}

    def weight_fingerprints(self, is_draft: bool, turn: Turn) -> dict[WeightPart, int]:
        """Fingerprint this rank's parts of the tensors in `turn`."""
        chosen = (slot for slot in self._slots(is_draft) if turn.takes(slot.parts[0].name))
        return part_fingerprints(held for slot in chosen for held in slot.read())

    def _slots(self, is_draft: bool) -> tuple[AnySlot, ...]:
        # Both of vLLM's model runners have these two methods, while their attributes differ.
        policy = self.model_runner.get_model()
        if not is_draft:
            return slots(policy)
        draft = self.model_runner.get_draft_model()
        if draft is None:
            raise LookupError("the engine drafts without a model")
        reads_states = self.vllm_config.speculative_config.method in ("eagle3", "dflash")
        # The checkpoint of a draft on hidden states has no prefix `model.`; a draft model has that of its checkpoint.
        rename = OF_READERS if reads_states else draft_names(draft)
        return slots(draft, rename=rename, without=policy)
