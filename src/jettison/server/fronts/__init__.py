"""Front ends in processes of their own (``--api-servers N``): HTTP, tokenizing, detokenizing, grammars and SSE there;
limits, books, files, batches and the engine in the controller, which answers all other paths through them."""
