"""What is known of load: monitors, samples, views by which policies decide, links.

Load is online load. What arrives, waits, has yet to be computed and fills steps with prompts, and how long answers and
stays are, is measured by class, and policies decide by the online figures. Offline requests are seen where they are in
the way: in what steps take, and in the blocks and places that they hold, with the time after which those come free.
"""
