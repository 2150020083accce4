"""Live view of a run in the terminal.

* `screen.py`: the dashboard of `crl train`, on the alternate screen.
* `follow.py`: contents of the dashboard of `crl watch`, read from a run directory.
* `frame.py`: the frame around a page, and the keys.
* `overview.py`, `tasks.py`, `models.py`, `bank.py`, `system.py` and `texts.py`: the pages. They are
  pure functions from a snapshot to lines. `parts.py` has the parts that they share.
* `terminal.py`: keys and signals of the terminal.

Texts of models, environments and users are always shown as plain text with escapes.
"""
