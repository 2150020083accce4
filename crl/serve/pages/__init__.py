"""Pages of the server: each module has the routes of its pages in `ROUTES`.

* `runs.py` with `parts.py`: list of runs, one run, settings, log, comparison.
* `bank.py` with `bank_list.py`: experiences of a bank, their search and their stories.
* `changes.py`: changes between steps and banks, requests, and the changes of the user.
* `episodes.py`: list of recorded episodes, and the viewer.
"""
