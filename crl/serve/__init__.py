"""Server of `crl serve`: pages about runs in a browser, live.

* `server.py`: address, token and process.
* `app.py`: the application; `security.py`: its protection against other sites and large responses.
* `site.py`: the runs below a directory, and how pages are rendered.
* `cache.py` and `database.py`: values of files, and asynchronous queries of banks.
* `pages/`: the pages.
* `events.py`: updates of open pages.
* `meaning.py`: search of a bank by meaning.
* `addresses.py`: query parameters.

Pages only read the run directories. Readers, charts and templates are those of `crl.report`.
"""
