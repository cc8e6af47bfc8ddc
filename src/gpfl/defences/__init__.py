"""Defences: clipping, noise and compression of what clients upload, around any method, and the privacy they guarantee."""

from gpfl.defences.config import NO_DEFENCE as NO_DEFENCE
from gpfl.defences.config import DefenceConfig as DefenceConfig
from gpfl.defences.defended import Defended as Defended
from gpfl.defences.defended import defence_warnings as defence_warnings
from gpfl.defences.defended import defend as defend
from gpfl.defences.defended import undefended as undefended
from gpfl.defences.defended import upload_bytes as upload_bytes
