"""Server of `crl serve`: pages about runs in a browser, live.

* `server.py`: address, token and process.
* `app.py`: the application; `security.py`: its protection against other sites and large responses.
* `site.py`: the runs below a directory, and how pages are rendered.
* `cache.py` and `database.py`: values of files, and asynchronous queries of banks.
* `pages.py` and `events.py`: list of runs, one run, comparison, and their updates.
* `bank.py` with `bank_list.py` and `meaning.py`: lessons of a bank, their search and their stories.
* `changes.py`: changes between steps and banks, requests, and the changes of the user.
* `episodes.py`: list of recorded episodes, and the viewer.
* `addresses.py`: query parameters.

Pages only read the run directories. Readers, charts and templates are those of `crl.report`.
"""
