# SPDX-License-Identifier: Apache-2.0
"""Many requests, many of them given up: nothing is lost, nothing is left."""

import gc
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from dflash_trt.api.completion import FinishReason
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.llm import LLM
from dflash_trt.runtime.request import Request
from tests.engines import build
from tests.llm.serving import await_idle
from tests.oracle.random_pairs import VOCAB_SIZE, write_random_pair

NUM_REQUESTS = 2000
NUM_CLIENTS = 6
CLIENT_PATIENCE = 600.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Engine and target of a tiny random pair whose tokens are letters."""
    path = tmp_path_factory.mktemp("soak")
    target, draft = write_random_pair(path, dialect="qwen3", seed=8)
    letters = {letter: i for i, letter in enumerate("abcd?"[:VOCAB_SIZE])}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel(letters, unk_token="?"))).save_pretrained(target)
    build(draft, path / "engine", target)
    return path / "engine", target


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def requests_alive() -> int:
    gc.collect()
    return sum(type(found) is Request for found in gc.get_objects())


class Client:
    """Asks at random, in every way there is, and counts what came back."""

    def __init__(self, llm: LLM, seed: int) -> None:
        self._llm = llm
        self._rng = random.Random(seed)
        self.finished: Counter[FinishReason] = Counter()
        self.asked = 0
        self.given_up = 0

    def run(self, num_requests: int) -> None:
        ways: list[Callable[[], None]] = [
            self._generate, self._generate_several, self._stream, self._give_up, self._give_up,
        ]  # fmt: skip
        end = self.asked + num_requests
        while self.asked < end:
            self._rng.choice(ways)()

    def _ask(self) -> tuple[list[int], SamplingParams]:
        self.asked += 1
        prompt = [self._rng.randrange(4) for _ in range(self._rng.randint(1, 40))]
        return prompt, SamplingParams(
            max_tokens=self._rng.randint(1, 20),
            temperature=self._rng.choice((0.0, 1.0)),
            stop=self._rng.choice(((), ("a b", "d c"))),
            logprobs=self._rng.random() < 0.2,
            ignore_eos=True,
        )

    def _generate(self) -> None:
        self.finished[self._llm.generate(*self._ask())[0].finish_reason] += 1

    def _generate_several(self) -> None:
        asked = [self._ask() for _ in range(3)]
        for answer in self._llm.generate([p for p, _ in asked], [s for _, s in asked]):
            self.finished[answer.finish_reason] += 1

    def _stream(self) -> None:
        *_, last = self._llm.stream(*self._ask())
        assert last.completion is not None
        self.finished[last.completion.finish_reason] += 1

    def _give_up(self) -> None:
        """After a few chunks, or before the first has come."""
        stream = self._llm.stream(*self._ask())
        *_, last = islice(stream, self._rng.randint(1, 3))
        stream.close()  # type: ignore[attr-defined]
        if last.completion is None:
            self.given_up += 1
        else:
            self.finished[last.completion.finish_reason] += 1


@pytest.mark.full
def test_soak(pair: tuple[Path, Path]) -> None:
    before = requests_alive()
    with LLM(*pair, max_batch_size=4, draft_length="auto", prefill_chunk=16, cache_gib=0.0002) as llm:
        assert llm.metrics().free_cache_tokens < 4 * 60, "some must wait for room"
        clients = [Client(llm, seed) for seed in range(NUM_CLIENTS)]
        resident = []
        for share in (NUM_REQUESTS // 4, NUM_REQUESTS - NUM_REQUESTS // 4):  # warm-up, soak
            with ThreadPoolExecutor(NUM_CLIENTS) as pool:
                runs = [pool.submit(client.run, share // NUM_CLIENTS) for client in clients]
                for run in runs:
                    run.result(CLIENT_PATIENCE)
            await_idle(llm)
            resident.append(resident_mib())
        assert requests_alive() == before
        assert resident[1] - resident[0] < 16
        metrics = llm.metrics()

    asked, given_up = sum(client.asked for client in clients), sum(client.given_up for client in clients)
    finished = sum((client.finished for client in clients), Counter[FinishReason]())
    assert asked >= NUM_REQUESTS - 2 * NUM_CLIENTS
    assert given_up > asked / 10
    assert finished.total() + given_up == asked
    assert sum(metrics.finished.values()) == asked
    assert set(finished) == {FinishReason.STOP, FinishReason.LENGTH}
    # A request may reach its end between its last chunk and the cancel.
    assert 0 < metrics.finished[FinishReason.CANCELLED] <= given_up
    assert metrics.finished[FinishReason.STOP] >= finished[FinishReason.STOP]
    assert metrics.finished[FinishReason.LENGTH] >= finished[FinishReason.LENGTH]
