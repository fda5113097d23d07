// certkvd: store, certifier and gate in one process, on one socket, without a config file.
#include "kernels/cuda/cuda.h"
#include "services/certifier/config.h"
#include "services/certifier/service.h"
#include "services/cluster/config.h"
#include "services/common/server_program.h"
#include "services/gate/config.h"
#include "services/gate/service.h"
#include "services/kvstore/config.h"
#include "services/kvstore/service.h"

int main(int argc, char** argv) {
  certkv::KvStoreConfig kvstore;
  certkv::CertifierConfig certifier;
  certkv::GateConfig gate;
  certkv::ServerProgram program({.name = "certkvd",
                                 .summary = "CertKV in one process: the store, the certifier and "
                                            "the gate, all three on one socket.",
                                 .socket_name = "certkvd.sock"});
  program.AddSection(certkv::KvStoreConfigSection(&kvstore));
  program.AddSection(certkv::CertifierConfigSection(&certifier));
  program.AddSection(certkv::GateConfigSection(&gate));
  program.AddSection(certkv::ClusterConfigSection(&kvstore.cluster));
  program.AddList(certkv::KvStoreTenantsList(&kvstore));
  program.AddList(certkv::KvStorePoolsList(&kvstore));
  program.AddList(certkv::GateOverridesList(&gate));
  program.OnConfigured([&](const certkv::ServerConfig& server) {
    kvstore.bulk.access = server.access;
    kvstore.bulk.has_members = kvstore.cluster.is_on();
    kvstore.bulk.has_access = true;
    if (kvstore.device != certkv::DeviceChoice::kHost ||
        certifier.device != certkv::DeviceChoice::kHost) {
      kvstore.device_error = certifier.device_error = certkv::cuda::UseDevice();
    }
    if (kvstore.fd_socket.empty()) kvstore.fd_socket = server.unix_socket + ".fd";
    if (certifier.store_socket.empty()) certifier.store_socket = server.unix_socket;
    if (gate.store_socket.empty()) gate.store_socket = server.unix_socket;
  });
  program.AddService<certkv::KvStoreServer>("certkv.kvstore.v1.KvStore", &kvstore);
  program.AddService<certkv::CertifierServer>("certkv.certifier.v1.Certifier", &certifier);
  program.AddService<certkv::GateServer>("certkv.gate.v1.Gate", &gate);
  return program.Run(argc, argv);
}
