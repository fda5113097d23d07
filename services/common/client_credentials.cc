#include "services/common/client_credentials.h"

#include <grpcpp/security/tls_certificate_provider.h>
#include <grpcpp/security/tls_credentials_options.h>

namespace certkv {
namespace {

constexpr unsigned kRefreshSeconds = 1;  // between looks at the files

}  // namespace

std::shared_ptr<grpc::ChannelCredentials> ClientCredentials(const CertificateFiles& files) {
  if (files.ca.empty()) return grpc::InsecureChannelCredentials();
  grpc::experimental::TlsChannelCredentialsOptions tls;
  tls.set_certificate_provider(std::make_shared<grpc::experimental::FileWatcherCertificateProvider>(
      files.key, files.certificate, files.ca, kRefreshSeconds));
  tls.watch_root_certs();
  if (!files.certificate.empty()) tls.watch_identity_key_cert_pairs();
  return grpc::experimental::TlsCredentials(tls);
}

}  // namespace certkv
