"""Build an engine directory from a draft checkpoint, then decode with it and with the target alone.

    python docs/examples/build_and_generate.py [DRAFT TARGET]

DRAFT and TARGET are directories or Hugging Face repository ids; without them, a small trained pair of this repository.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from dflash_trt import LLM, SamplingParams

FIXTURES = Path(__file__).parents[2] / "tests" / "fixtures"
PROMPTS = ["def isleap(year):", "class Error(Exception):"]

draft, target = sys.argv[1:] or (str(FIXTURES / "tiny-qwen3-dflash"), str(FIXTURES / "tiny-qwen3"))
params = SamplingParams(max_tokens=48, temperature=0)

with tempfile.TemporaryDirectory() as directory:
    engine = f"{directory}/engine"
    subprocess.run(["dflash-trt", "build", draft, "--target", target, "-o", engine], check=True)
    with LLM(engine, target) as llm:
        drafted = llm.generate(PROMPTS, params)
    with LLM(engine, target, draft_length=0) as llm:
        plain = llm.generate(PROMPTS, params)

for prompt, answer, expected in zip(PROMPTS, drafted, plain, strict=True):
    assert answer.token_ids == expected.token_ids, "drafting must not change the text"
    print(f"{prompt}{answer.text}\n# tau {answer.tau:.2f}: tokens per pass of the target\n")
