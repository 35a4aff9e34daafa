"""Re-runs the findings of the Vision Transformer literature at the scale at hand: `vitrail reproduce`.

arm              Arm, Trial: the settings that are compared, and their training runs
experiment       Experiment: the claim, the arms, the analysis of their results
experiments/     one module per experiment
scales           the settings that experiments derive their arms from
planning, cost   which trials to run, in which order; parts and budgets; estimated durations
session, pool    the folder of one experiment; processes that run trials: worker, edits, measures/
results          the finished trials; means and differences over seeds
analysis         verdicts, tables and figures; plots, compute_plot: the figures; curves: crossings, Pareto fronts
experiment_page  HTML and Markdown from an analysis; experiment_list: all experiments with their recorded results
dry_run, memory  whether an experiment can run on this machine
reproduce        `vitrail.reproduce`
"""
