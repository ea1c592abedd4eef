"""Files and batches (``/v1/files``, ``/v1/batches``): offline work that is kept on disk and outlives the server.

``store`` is the only room that knows SQLite, ``records`` what stands in it, ``lines`` and ``check`` what a line may
say, ``run`` the life of one batch, ``service`` all of them; ``api`` and ``uploads`` speak HTTP. Requests become core
Requests where all others do (``server.endpoint``); nothing here decides when one is computed.
"""
