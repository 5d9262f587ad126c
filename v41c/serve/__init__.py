"""`v41c serve`: an engine behind HTTP, in the dialect of the OpenAI API. Imports neither torch nor a compiler."""
