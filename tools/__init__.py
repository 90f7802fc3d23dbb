"""Commands around a training run, one file each: `python tools/NAME.py --help`."""
