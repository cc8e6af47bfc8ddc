"""Personal models of clients: prediction, export as modules, and model files."""

from gpfl.inference.client_model import ClientModel as ClientModel
from gpfl.inference.load import load_model as load_model
from gpfl.inference.load import load_models as load_models
