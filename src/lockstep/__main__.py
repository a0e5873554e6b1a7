"""python -m lockstep"""

from lockstep.cli import app

app(prog_name="lockstep")
