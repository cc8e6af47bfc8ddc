"""Reports: tables and figures made from run folders."""
