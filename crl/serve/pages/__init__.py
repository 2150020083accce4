"""Pages of the server: each module has the routes of its pages in `ROUTES`."""
