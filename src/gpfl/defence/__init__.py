"""Defences: wrappers of any method that bound, blur or shrink what leaves a client, and what they promise."""

from gpfl.defence.record import UNDEFENDED as UNDEFENDED
from gpfl.defence.record import Defence as Defence
from gpfl.defence.wrapped import Defended as Defended
from gpfl.defence.wrapped import cautions as cautions
from gpfl.defence.wrapped import defended as defended
