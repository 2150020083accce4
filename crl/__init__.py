"""Training of LLM agents with Complementary Reinforcement Learning (CRL).

`crl/run/loop.py` is a good starting point for readers. The command line is in `crl/cli`.
"""

__version__ = "0.1.0"
