// How a client's channel believes a server and shows who it is.
#ifndef CERTKV_SERVICES_COMMON_CLIENT_CREDENTIALS_H_
#define CERTKV_SERVICES_COMMON_CLIENT_CREDENTIALS_H_

#include <grpcpp/security/credentials.h>

#include <memory>

#include "services/common/certificate.h"

namespace certkv {

// TLS with these files, each read again within a second of its change; without a CA no TLS. Files
// that can't be read make calls fail: CheckCertificateFiles tells before.
std::shared_ptr<grpc::ChannelCredentials> ClientCredentials(const CertificateFiles& files);

}  // namespace certkv

#endif  // CERTKV_SERVICES_COMMON_CLIENT_CREDENTIALS_H_
