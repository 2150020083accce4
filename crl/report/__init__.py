"""Views of runs for readers: the HTML report and its charts."""
