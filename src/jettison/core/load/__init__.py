"""Knowledge of load: monitors, samples, views by which policies decide, links.

Load is online load. Arrivals, queues, tokens to be computed, the prompts' share of steps, and the lengths of answers
and stays are measured by class, and policies decide by the online figures. Offline requests count where they are in the
way: in the time of steps, and in the blocks and places that they hold, with the time after which those come free.
"""
