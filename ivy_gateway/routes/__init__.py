"""One dialect a file: wire models, to_job / from_result, handlers."""
