# SPDX-License-Identifier: Apache-2.0
"""Program of each rank in a test: `python -m tests.runtime.ranks.script NUM_RANKS ROLE ARGUMENT...`."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from dflash_trt.errors import DFlashError, RequestError
from dflash_trt.runtime.ranks.join import join
from dflash_trt.runtime.ranks.roles import Follower, Leader

SIGNALS = {"interrupt": signal.SIGINT, "terminate": signal.SIGTERM}
FACTS = {"engine": "A", "target": "T"}


def decode(ranks: Leader | Follower, engine: str, target: str, output: str) -> None:
    """The pair script on sharded ranks; rank 0 saves the answers."""
    import torch

    from tests.runtime.ranks.test_sharded_target import load_pairs, run_script

    pairs, share = load_pairs(Path(engine), Path(target), ranks)
    assert isinstance(ranks, Leader), "the others have followed"
    torch.save(run_script(*pairs) | {"share": torch.tensor(share)}, output)


def add(ranks: Leader | Follower) -> None:
    """Every rank adds its number + 1; rank 0 prints the sum and what the ranks run with."""
    import torch
    from torch import distributed

    ranks.verify_same_facts(FACTS)
    numbers = torch.tensor([ranks.rank + 1])
    distributed.all_reduce(numbers)
    if isinstance(ranks, Follower):
        assert ranks.receive() is None
        return
    print(numbers.item(), torch.get_num_threads(), os.environ["GLOO_SOCKET_IFNAME"])


def odd(ranks: Leader | Follower) -> None:
    """Rank 1 has another target."""
    ranks.verify_same_facts(FACTS | {"target": "another"} if ranks.rank == 1 else FACTS)


def lose(ranks: Leader | Follower, how: str) -> None:
    """Rank 1 ends amid collectives, or rank 0 is interrupted."""
    from torch import distributed, ones

    if ranks.rank == 1 and how == "early":
        raise RequestError("expected something else, found this early")
    ranks.verify_same_facts(FACTS)
    for step in range(100_000):
        distributed.all_reduce(ones(1))
        if step == 20 and ranks.rank == 0 and how in SIGNALS:
            os.killpg(0, SIGNALS[how])
        if step == 20 and ranks.rank == 1:
            _end(how)


def idle(ranks: Leader | Follower) -> None:
    """Rank 1 is killed while rank 0 waits for work, and the others for rank 0."""
    ranks.verify_same_facts(FACTS)
    if ranks.rank == 1:
        _end("kill")
    if isinstance(ranks, Follower):
        ranks.receive()
    time.sleep(3600)


def wait(ranks: Leader | Follower) -> None:
    """Every rank says its number as a process, and waits."""
    ranks.verify_same_facts(FACTS)
    print(os.getpid(), flush=True)
    time.sleep(3600)


def fail(ranks: Leader | Follower, how: str) -> None:
    """Rank 0 ends while the others wait for it in a collective."""
    from torch import distributed, ones

    ranks.verify_same_facts(FACTS)
    if ranks.rank == 0:
        _end(how)
    distributed.all_reduce(ones(1))


def command(lost: str, num_calls: str, *arguments: str) -> NoReturn:
    """`dflash-trt ARGUMENTS`; rank `lost` is killed when its target has answered a number of calls."""
    from dflash_trt.cli import main as run
    from dflash_trt.runtime.ranks.sharded_target import Call

    call, done = Call.run, 0

    def counted(*given: Any) -> Any:
        nonlocal done
        done += 1
        if [os.environ["RANK"], str(done)] == [lost, num_calls]:
            _end("kill")
        return call(*given)

    Call.run = counted  # type: ignore[method-assign]
    sys.argv = ["dflash-trt", *arguments]
    run()


def _end(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "raise":
        raise RequestError("expected something else, found this")
    if how == "bug":
        raise KeyError("a bug")


ROLES: dict[str, Callable[..., None]] = {
    "decode": decode, "add": add, "odd": odd, "lose": lose, "idle": idle, "wait": wait, "fail": fail,
}  # fmt: skip


def main(num_ranks: str, role: str, *arguments: str) -> int:
    """Ends as `dflash_trt.cli.main` does: an error is one line on stderr and exit code 1."""
    if role == "command":
        command(*arguments)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        with join(int(num_ranks)) as ranks:
            ROLES[role](ranks, *arguments)
    except DFlashError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("Aborted!", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
