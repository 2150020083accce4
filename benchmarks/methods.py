"""Methods of the field on the same tasks, by one command.

    python benchmarks/methods.py --jobs 2

This is `coevolution.py --figure methods` (see there): GRPO, GiGPO, Role-Agent, EMPO², Reflexion,
Complementary RL, and Complementary RL with self-distillation. Stored runs are not repeated.
"""

from __future__ import annotations

import sys

import coevolution

if __name__ == "__main__":
    sys.argv[1:1] = ["--figure", "methods"]
    coevolution.main()
