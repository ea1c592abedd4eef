"""The controller's side: the engine, its core's driver, the launcher of workers, and what a front end may ask."""
