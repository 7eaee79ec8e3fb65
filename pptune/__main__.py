"""`python -m pptune` and `torchrun -m pptune` start here."""

from pptune.cli import main

if __name__ == "__main__":
    main()
