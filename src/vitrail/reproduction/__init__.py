"""Re-runs the findings of the Vision Transformer literature at the scale at hand: `vitrail reproduce`.

experiment       Arm, Trial, Experiment: what is compared and what is claimed
experiments/     one module per experiment: its arms and the analysis of their results
scales           the settings that experiments derive their arms from
planning, cost   which trials to run, in which order; parts and budgets; estimated durations
pool, worker     processes that run trials; measures: what they measure besides accuracy
results          the finished trials; means and differences over seeds
analysis         verdicts, tables and figures; plots: the figures
page             HTML and Markdown from an analysis
reproduce        `vitrail.reproduce`
"""
