#include "kernels/core/sha256.h"

#include <openssl/evp.h>

#include <bit>

#include "kernels/core/check.h"

namespace certkv {

struct Sha256::State {
  EVP_MD_CTX* context = nullptr;
};

Sha256::Sha256() : state_(std::make_unique<State>()) {
  state_->context = EVP_MD_CTX_new();
  CERTKV_CHECK(
      state_->context != nullptr && EVP_DigestInit_ex(state_->context, EVP_sha256(), nullptr) == 1,
      "OpenSSL provides SHA-256");
}

Sha256::~Sha256() { EVP_MD_CTX_free(state_->context); }  // null after Finish()

void Sha256::AddBytes(absl::string_view bytes) {
  CERTKV_CHECK(state_->context != nullptr &&
                   EVP_DigestUpdate(state_->context, bytes.data(), bytes.size()) == 1,
               "SHA-256 accepts bytes until it is finished");
}

void Sha256::AddSized(absl::string_view bytes) {
  AddU32(static_cast<uint32_t>(bytes.size()));
  AddBytes(bytes);
}

void Sha256::AddU32(uint32_t value) {
  char bytes[4];
  for (int i = 0; i < 4; ++i) bytes[i] = static_cast<char>(value >> (8 * i));
  AddBytes(absl::string_view(bytes, sizeof(bytes)));
}

void Sha256::AddU64(uint64_t value) {
  AddU32(static_cast<uint32_t>(value));
  AddU32(static_cast<uint32_t>(value >> 32));
}

void Sha256::AddF32(float value) { AddU32(std::bit_cast<uint32_t>(value)); }

std::array<uint8_t, 32> Sha256::Finish() {
  std::array<uint8_t, 32> digest{};
  unsigned int size = 0;
  // OpenSSL itself would quietly give other bytes the second time.
  CERTKV_CHECK(state_->context != nullptr &&
                   EVP_DigestFinal_ex(state_->context, digest.data(), &size) == 1 && size == 32,
               "SHA-256 is finished once and gives 32 bytes");
  EVP_MD_CTX_free(state_->context);
  state_->context = nullptr;
  return digest;
}

}  // namespace certkv
