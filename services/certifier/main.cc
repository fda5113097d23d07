// certkv-certifier: attention over stored blocks, with a certificate for each read.
#include "kernels/cuda/cuda.h"
#include "services/certifier/config.h"
#include "services/certifier/service.h"
#include "services/common/server_program.h"

int main(int argc, char** argv) {
  certkv::CertifierConfig config;
  certkv::ServerProgram program({.name = "certkv-certifier",
                                 .summary = "Computes attention over stored blocks, with a "
                                            "certificate for each read.",
                                 .socket_name = "certifier.sock"});
  program.AddSection(certkv::CertifierConfigSection(&config));
  program.OnConfigured([&config](const certkv::ServerConfig& /*server*/) {
    if (config.device != certkv::DeviceChoice::kHost) {
      config.device_error = certkv::cuda::UseDevice();
    }
  });
  program.AddService<certkv::CertifierServer>("certkv.certifier.v1.Certifier", &config);
  return program.Run(argc, argv);
}
