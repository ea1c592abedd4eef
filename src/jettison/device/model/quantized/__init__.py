"""Weights that a quantizer has made small: read as the integers that are stored, or widened as they are read. In which
way is decided elsewhere (``device.model.kept``).

``config`` reads what ``config.json`` says of them into one of ``schemes``, and refuses what is not known; it needs no
torch. ``recipes`` says of which stored tensors each wanted one is made, by the module of its format. ``signs`` tells
quantized weights that are not read. Not here: files (``checkpoint``), slabs and digests (``weights``).
"""
