"""crl trains LLM agents with Complementary Reinforcement Learning. Start at `crl/run/loop.py`; the command line is `crl/cli`."""

__version__ = "0.1.0"
