"""Context-parallel attention of several libraries in one race: `make bench`.

cells.py has the shapes, contestants.py who computes them, oracle.py the right values. measure.py asks who can do a cell
and has ranks.py time them in rounds; results.py makes numbers of the samples, page.py and picture.py show them.
"""
