"""python -m lockstep"""

from lockstep.cli import app

if __name__ == "__main__":  # ranks that `verify` starts import this module again
    app(prog_name="lockstep")
