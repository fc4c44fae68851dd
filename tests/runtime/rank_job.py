"""One rank of a test: rank 0 answers a prompt again and again, the others do as told.

Called with an artifact and how often; 0 is for ever. Prints the token ids of each answer.
"""

import json
import sys
from pathlib import Path

from sitsc.core.errors import SitscError
from sitsc.core.sampling import SamplingOptions
from sitsc.runtime.loader import load

PROMPT = [5, 17, 33, 4, 90, 12, 7]


def main(artifact: Path, times: int) -> None:
    """Load this rank and work."""
    session = load(artifact)
    if session.follows:
        session.serve()
        return
    options, count = SamplingOptions(max_tokens=40), 0
    while times == 0 or count < times:
        answers = session.engine.generate_batch([PROMPT, PROMPT[2:], PROMPT[:3]], options)
        print(json.dumps([list(answer.token_ids) for answer in answers]), flush=True)
        count += 1
    session.close()


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]))
    except SitscError as error:
        sys.exit(f"sitsc: {error}")
