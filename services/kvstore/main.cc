// certkv-kvstore: stores and shares the KV blocks of running sequences.
#include "kernels/cuda/cuda.h"
#include "services/cluster/config.h"
#include "services/common/server_program.h"
#include "services/kvstore/config.h"
#include "services/kvstore/service.h"

int main(int argc, char** argv) {
  certkv::KvStoreConfig config;
  certkv::ServerProgram program({.name = "certkv-kvstore",
                                 .summary = "Stores KV blocks, quantized and original, and shares "
                                            "them between workers on this host.",
                                 .socket_name = "kvstore.sock"});
  program.AddSection(certkv::KvStoreConfigSection(&config));
  program.AddSection(certkv::ClusterConfigSection(&config.cluster));
  program.AddList(certkv::KvStoreTenantsList(&config));
  program.AddList(certkv::KvStorePoolsList(&config));
  program.OnConfigured([&config](const certkv::ServerConfig& server) {
    config.bulk.access = server.access;
    config.bulk.has_members = config.cluster.is_on();
    config.bulk.has_access = true;
    if (config.device != certkv::DeviceChoice::kHost) {
      config.device_error = certkv::cuda::UseDevice();
    }
    if (config.fd_socket.empty()) config.fd_socket = server.unix_socket + ".fd";
  });
  program.AddService<certkv::KvStoreServer>("certkv.kvstore.v1.KvStore", &config);
  return program.Run(argc, argv);
}
