"""The controller's side: the engine, its core's driver, the crew of workers, and what a front end may ask."""
