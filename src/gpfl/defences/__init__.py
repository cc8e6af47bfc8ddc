"""Defences: wrappers of any method that bound, blur or shrink what leaves a client, and what they promise."""

from gpfl.defences.config import NO_DEFENCE as NO_DEFENCE
from gpfl.defences.config import DefenceConfig as DefenceConfig
from gpfl.defences.defended import Defended as Defended
from gpfl.defences.defended import cautions as cautions
from gpfl.defences.defended import defended as defended
from gpfl.defences.defended import upload_bytes as upload_bytes
