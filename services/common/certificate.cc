#include "services/common/certificate.h"

#include <openssl/asn1.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/x509.h>
#include <openssl/x509v3.h>

#include <ctime>
#include <fstream>
#include <iterator>
#include <memory>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "kernels/core/status.h"
#include "services/common/private_file.h"

namespace certkv {
namespace {

template <typename T, void (*free)(T*)>
struct Free {
  void operator()(T* object) const { free(object); }
};
using Certificate = std::unique_ptr<X509, Free<X509, X509_free>>;
using Key = std::unique_ptr<EVP_PKEY, Free<EVP_PKEY, EVP_PKEY_free>>;
using Bio = std::unique_ptr<BIO, Free<BIO, BIO_free_all>>;

// A PEM file of more bytes is none of ours.
constexpr int64_t kPemBytesMax = 1 << 20;

absl::Status Invalid(absl::string_view message) {
  ERR_clear_error();  // the queue belongs to the thread and would be read as another call's
  return MakeError(absl::StatusCode::kInvalidArgument, "TLS_CERTIFICATE_INVALID", message);
}

Bio MemoryBio(absl::string_view text) {
  return Bio(BIO_new_mem_buf(text.data(), static_cast<int>(text.size())));
}

Certificate ReadCertificate(absl::string_view pem) {
  if (pem.size() > kPemBytesMax) return nullptr;
  return Certificate(PEM_read_bio_X509(MemoryBio(pem).get(), nullptr, nullptr, nullptr));
}

// No passphrase is asked for: a server has nobody to ask.
int NoPassphrase(char*, int, int, void*) { return -1; }

absl::StatusOr<int64_t> ToEpochMs(const ASN1_TIME* time) {
  std::tm parts{};
  if (ASN1_TIME_to_tm(time, &parts) != 1) return Invalid("a certificate has a time that is none");
  return int64_t{timegm(&parts)} * 1000;
}

std::string TextOf(const ASN1_STRING* text) {
  return std::string(reinterpret_cast<const char*>(ASN1_STRING_get0_data(text)),
                     static_cast<size_t>(ASN1_STRING_length(text)));
}

std::vector<std::string> NamesOf(const X509* certificate) {
  std::vector<std::string> names;
  const X509_NAME* subject = X509_get_subject_name(certificate);
  for (int at = X509_NAME_get_index_by_NID(subject, NID_commonName, -1); at >= 0;
       at = X509_NAME_get_index_by_NID(subject, NID_commonName, at)) {
    names.push_back(TextOf(X509_NAME_ENTRY_get_data(X509_NAME_get_entry(subject, at))));
  }
  auto* alternatives = static_cast<GENERAL_NAMES*>(
      X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr));
  for (int i = 0; i < sk_GENERAL_NAME_num(alternatives); ++i) {
    const GENERAL_NAME* name = sk_GENERAL_NAME_value(alternatives, i);
    const bool is_text = name->type == GEN_DNS || name->type == GEN_URI || name->type == GEN_EMAIL;
    if (is_text && ASN1_STRING_length(name->d.ia5) > 0) names.push_back(TextOf(name->d.ia5));
  }
  GENERAL_NAMES_free(alternatives);
  return names;
}

absl::StatusOr<std::string> ReadPem(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return Invalid(absl::StrCat("can't open ", path, "; check the path and who may read it"));
  }
  std::string text(static_cast<size_t>(kPemBytesMax) + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

absl::StatusOr<Certificate> CheckFile(const std::string& path, int64_t now_ms) {
  CERTKV_ASSIGN_OR_RETURN(const std::string pem, ReadPem(path));
  const absl::StatusOr<CertificateInfo> info = ParseCertificate(pem);
  if (!info.ok()) return Invalid(absl::StrCat(path, " holds no certificate in PEM"));
  CERTKV_RETURN_IF_ERROR(CheckValidity(*info, now_ms, path));
  return ReadCertificate(pem);
}

}  // namespace

absl::StatusOr<CertificateInfo> ParseCertificate(absl::string_view pem) {
  const Certificate certificate = ReadCertificate(pem);
  if (certificate == nullptr) return Invalid("the text holds no certificate in PEM");
  CertificateInfo info;
  const Bio subject(BIO_new(BIO_s_mem()));
  X509_NAME_print_ex(subject.get(), X509_get_subject_name(certificate.get()), 0, XN_FLAG_ONELINE);
  char* text = nullptr;
  const int64_t size = BIO_get_mem_data(subject.get(), &text);
  if (size > 0) info.subject.assign(text, static_cast<size_t>(size));
  CERTKV_ASSIGN_OR_RETURN(info.not_before_ms, ToEpochMs(X509_get0_notBefore(certificate.get())));
  CERTKV_ASSIGN_OR_RETURN(info.not_after_ms, ToEpochMs(X509_get0_notAfter(certificate.get())));
  info.names = NamesOf(certificate.get());
  return info;
}

absl::Status CheckValidity(const CertificateInfo& info, int64_t now_ms, absl::string_view what) {
  if (info.not_before_ms <= now_ms && now_ms <= info.not_after_ms) return absl::OkStatus();
  const auto text = [](int64_t time_ms) {
    return absl::FormatTime(absl::FromUnixMillis(time_ms), absl::UTCTimeZone());
  };
  return MakeError(
      absl::StatusCode::kFailedPrecondition, "TLS_CERTIFICATE_EXPIRED",
      absl::StrCat(what, " (", info.subject, ") is valid from ", text(info.not_before_ms), " to ",
                   text(info.not_after_ms), ", and it is ", text(now_ms),
                   "; renew it, or set the clock right"));
}

absl::Status CheckCertificateFiles(const CertificateFiles& files, int64_t now_ms) {
  if (!files.ca.empty()) CERTKV_RETURN_IF_ERROR(CheckFile(files.ca, now_ms).status());
  if (files.certificate.empty() != files.key.empty()) {
    return Invalid(absl::StrCat("a certificate and its key come together; there is only ",
                                files.certificate.empty() ? files.key : files.certificate));
  }
  if (files.certificate.empty()) return absl::OkStatus();
  CERTKV_ASSIGN_OR_RETURN(const Certificate certificate, CheckFile(files.certificate, now_ms));
  CERTKV_RETURN_IF_ERROR(CheckPrivateFile(files.key));
  CERTKV_ASSIGN_OR_RETURN(const std::string pem, ReadPem(files.key));
  const Key key(PEM_read_bio_PrivateKey(MemoryBio(pem).get(), nullptr, NoPassphrase, nullptr));
  if (key == nullptr) {
    return Invalid(absl::StrCat(files.key,
                                " holds no private key in PEM, or one with a "
                                "passphrase; write it without"));
  }
  if (X509_check_private_key(certificate.get(), key.get()) != 1) {
    return Invalid(
        absl::StrCat(files.key, " is not the key of ", files.certificate, "; make the pair again"));
  }
  return absl::OkStatus();
}

}  // namespace certkv
