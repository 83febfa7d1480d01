"""NeMo Gym's example of a server with sessions, run as `nemo_gym_server.py PORT` without the server that `gym` starts beside it."""

import sys
from unittest.mock import MagicMock

import uvicorn
from nemo_gym.server_utils import ServerClient
from resources_servers.example_session_state_mgmt.app import StatefulCounterResourcesServer, StatefulCounterResourcesServerConfig

config = StatefulCounterResourcesServerConfig(host="127.0.0.1", port=int(sys.argv[1]), entrypoint="", name="")
server = StatefulCounterResourcesServer(config=config, server_client=MagicMock(spec=ServerClient))
uvicorn.run(server.setup_webserver(), port=config.port, log_level="warning")
