"""The planner's prefix cache against vLLM's own blocks."""

import hashlib
import pickle
from random import Random

import pytest

from cua_rl.machine.prefix_cache import Chain, PrefixCache, RolloutShape

BLOCK, SAMPLED, SHARED = 16, 150, 1200


class VllmCache:
    """vLLM's manager of blocks, with requests of given tokens."""

    def __init__(self, num_blocks: int) -> None:
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.request import Request

        def sha256(value: object) -> bytes:
            return hashlib.sha256(pickle.dumps(value)).digest()

        init_none_hash(sha256)
        spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        # one block stands for none
        settings = KVCacheConfig(
            num_blocks=num_blocks + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        self.manager = KVCacheManager(
            settings, max_model_len=1 << 20, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True
        )
        hasher, params = get_request_block_hasher(BLOCK, sha256), SamplingParams(max_tokens=1)

        def make(name: str, tokens: list[int]) -> Request:
            return Request(name, tokens, params, None, block_hasher=hasher)

        self.make = make
        self.requests = dict[str, Request]()

    def start(self, name: str, tokens: list[int]) -> int | None:
        request = self.make(name, tokens)
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        if self.manager.allocate_slots(request, len(tokens) - hit, hit, blocks) is None:
            return None
        self.requests[name] = request
        return hit

    def finish(self, name: str) -> None:
        self.manager.free(self.requests.pop(name))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("max_images", "drop"), [(12, 1), (4, 2), (3, 1)])
@pytest.mark.parametrize("num_blocks", [700, 1500, 6000])
def test_the_simulated_cache_finds_what_vllms_own_finds(seed: int, max_images: int, drop: int, num_blocks: int) -> None:
    random, num_rollouts = Random(seed), 9
    shape = RolloutShape(num_turns=12, screen_tokens=301, max_images=max_images, drop=drop, context_tokens=1 << 20)
    ours, theirs = PrefixCache(num_blocks, BLOCK), VllmCache(num_blocks)
    shared = list(range(SHARED))
    chains = [ours.new_chain() for _ in range(num_rollouts)]
    names, turns = list(range(num_rollouts)), [0] * num_rollouts
    running: list[int] = []
    hits = [0, 0]
    for _ in range(600):
        slot = random.randrange(num_rollouts)
        if slot in running:
            running.remove(slot)
            ours.finish(chains[slot])
            theirs.finish(str(slot))
            turns[slot] += 1
            if turns[slot] == shape.num_turns or random.random() < 0.03:
                chains[slot], turns[slot], names[slot] = ours.new_chain(), 0, max(names) + 1
            continue
        turn = turns[slot]
        tokens = prompt_and_answer(shared, names[slot], shape, turn)
        prompt = shape.prompt_tokens(turn)
        assert len(tokens) == prompt + SAMPLED - 1  # the last sampled token is not computed
        found = ours.start(chains[slot], prompt=prompt, same=shape.same_tokens(turn), sampled=SAMPLED)
        expected = theirs.start(str(slot), tokens)
        assert found == expected, (slot, turn)
        if found is not None:
            running.append(slot)
            hits = [hits[0] + found, hits[1] + prompt]
    assert hits[0] > 0
    assert theirs.manager.block_pool.get_num_free_blocks() == ours.num_free


def prompt_and_answer(shared: list[int], name: int, shape: RolloutShape, turn: int) -> list[int]:
    """Tokens of a request: those of a dropped screenshot are missing, all others are of one rollout alone."""
    tokens = list(shared)
    base = 10_000 + name * 1_000_000
    for index in range(turn + 1):
        place = base + index * 10_000
        if index >= shape.num_dropped(turn):
            tokens += range(place, place + shape.screen_tokens)
        tokens += range(place + 5_000, place + 5_060)
        tokens += range(place + 6_000, place + 6_000 + SAMPLED)
    return tokens[:-1]


def test_a_request_waits_until_others_have_ended() -> None:
    cache = PrefixCache(100, BLOCK)
    chains: list[Chain] = [cache.new_chain() for _ in range(2)]

    assert cache.start(chains[0], prompt=1300, same=1200, sampled=150) == 0
    assert cache.start(chains[1], prompt=1300, same=1200, sampled=150) is None  # 91 blocks are in use, 16 are missing
    cache.finish(chains[0])
    assert cache.start(chains[1], prompt=1300, same=1200, sampled=150) == 1200
