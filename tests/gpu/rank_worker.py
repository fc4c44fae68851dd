"""One rank of a job: `python -m tests.gpu.rank_worker ROOT OUT`; rank 0 writes answers as JSON."""

import json
import sys
from pathlib import Path

from sitsc.core.sampling import SamplingOptions
from sitsc.runtime.loader import Session, load
from sitsc.runtime.measure import random_ids

ALONE, BATCHES, ANSWER = (1, 5, 40, 300), (4, 9, 16), 40


def prompts(session: Session) -> list[list[list[int]]]:
    """Batches of prompts: some alone, then some together."""
    size = session.artifact.plan.tokens.vocab_size
    alone = [[random_ids(n, size, seed=n)] for n in ALONE]
    return alone + [[random_ids(7 + 3 * i, size, seed=50 + i) for i in range(b)] for b in BATCHES]


def answers(session: Session, batches: list[list[list[int]]]) -> list[list[list[int]]]:
    """What greedy decoding answers each."""
    options = SamplingOptions(max_tokens=ANSWER, ignore_eos=True)
    return [
        [list(made.token_ids) for made in session.engine.generate_batch(batch, options)]
        for batch in batches
    ]


def main() -> None:
    """Serve, or generate and write."""
    session = load(sys.argv[1])
    if session.follows:
        session.serve()
        return
    try:
        made = answers(session, prompts(session))
        if len(sys.argv) > 3:  # until somebody ends a rank
            while True:
                answers(session, prompts(session))
        Path(sys.argv[2]).write_text(json.dumps(made))
    finally:
        session.close()


if __name__ == "__main__":
    main()
