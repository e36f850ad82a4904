"""`python -m experiments.run --list | NAME [--quick] [--out FILE]`: ask models for answers, and write the result
file."""
from benchmarks.run import main

if __name__ == "__main__": main(package="experiments")
