// certkv-gate: decides what reads must satisfy and keeps the risk of each request.
#include "services/common/server_program.h"
#include "services/gate/config.h"
#include "services/gate/service.h"

int main(int argc, char** argv) {
  certkv::GateConfig config;
  certkv::ServerProgram program({.name = "certkv-gate",
                                 .summary = "Decides what attention reads must satisfy and keeps "
                                            "the risk of each request.",
                                 .socket_name = "gate.sock"});
  program.AddSection(certkv::GateConfigSection(&config));
  program.AddList(certkv::GateOverridesList(&config));
  program.AddService<certkv::GateServer>("certkv.gate.v1.Gate", &config);
  return program.Run(argc, argv);
}
