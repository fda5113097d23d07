#include "services/kvstore/bulk_socket.h"

#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>

#include <algorithm>
#include <array>
#include <boost/asio/post.hpp>
#include <boost/asio/redirect_error.hpp>
#include <boost/asio/ssl/host_name_verification.hpp>
#include <boost/asio/use_awaitable.hpp>
#include <chrono>
#include <fstream>

#include "absl/strings/str_cat.h"
#include "kernels/core/status.h"
#include "services/common/certificate.h"

namespace certkv::kvstore {
namespace {

namespace asio = boost::asio;
namespace ssl = boost::asio::ssl;
using asio::ip::tcp;
using boost::system::error_code;

constexpr size_t kBuffersMax = 64;  // of one call of the system, as Asio has it
// Larger than what a connection has by default: fewer wake-ups for blocks of megabytes.
constexpr int kSocketBufferBytes = 4 << 20;

int64_t NumberIn(const char* path) {
  std::ifstream file(path);
  int64_t number = 0;
  file >> number;
  return number;
}

// "[::1]:4711" is ::1 and 4711.
std::pair<std::string, std::string> SplitAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') {
    host = host.substr(1, host.size() - 2);
  }
  return {host, address.substr(colon + 1)};
}

// At most kBuffersMax buffers of what the spans hold from byte `at` on.
template <typename Buffer>
std::vector<Buffer> BuffersFrom(absl::Span<const absl::Span<uint8_t>> spans, int64_t at) {
  std::vector<Buffer> buffers;
  for (const auto& span : spans) {
    const auto size = static_cast<int64_t>(span.size());
    if (at >= size) {
      at -= size;
      continue;
    }
    buffers.emplace_back(span.data() + at, static_cast<size_t>(size - at));
    at = 0;
    if (buffers.size() == kBuffersMax) break;
  }
  return buffers;
}

int64_t TotalBytes(absl::Span<const absl::Span<uint8_t>> spans) {
  int64_t bytes = 0;
  for (const auto& span : spans) bytes += static_cast<int64_t>(span.size());
  return bytes;
}

std::unique_ptr<ssl::context> NewContext() {
  auto context = std::make_unique<ssl::context>(ssl::context::tls);
  context->set_options(ssl::context::default_workarounds | ssl::context::no_sslv2 |
                       ssl::context::no_sslv3 | ssl::context::no_tlsv1 | ssl::context::no_tlsv1_1);
  return context;
}

absl::Status TlsUnusable(const CertificateFiles& files, const error_code& error) {
  ERR_clear_error();
  return MakeError(absl::StatusCode::kInvalidArgument, "TLS_CERTIFICATE_INVALID",
                   absl::StrCat("can't use ", files.certificate, ", ", files.key, " and ", files.ca,
                                " for TLS: ", error.message()));
}

// The files were checked a moment ago, so that the error says which one.
absl::StatusOr<BulkSocket::Tls> MakeTls(const CertificateFiles& files, bool verify_peer,
                                        int64_t now_ms) {
  CERTKV_RETURN_IF_ERROR(CheckCertificateFiles(files, now_ms));
  BulkSocket::Tls context = NewContext();
  error_code error;
  if (!files.certificate.empty()) {
    context->use_certificate_chain_file(files.certificate, error);
    if (error) return TlsUnusable(files, error);
    context->use_private_key_file(files.key, ssl::context::pem, error);
    if (error) return TlsUnusable(files, error);
  }
  if (!verify_peer) return context;
  context->load_verify_file(files.ca, error);
  if (error) return TlsUnusable(files, error);
  context->set_verify_mode(ssl::verify_peer | ssl::verify_fail_if_no_peer_cert, error);
  if (error) return TlsUnusable(files, error);
  return context;
}

}  // namespace

// A buffer that was set does not grow by itself any more, so one that the system would cut short is
// worse than none: at its default limit of 208 KiB a connection of 10 ms carries 20 MB/s.
int BulkBufferBytes(int64_t limit_bytes) {
  return limit_bytes < kSocketBufferBytes ? 0 : kSocketBufferBytes;
}

absl::StatusOr<BulkSocket::Tls> MakeBulkServerTls(const AccessConfig& access, int64_t now_ms) {
  if (access.tcp_security == TcpSecurity::kInsecure) return BulkSocket::Tls();
  const CertificateFiles files = access.certificate_files();
  return MakeTls(files, !files.ca.empty(), now_ms);
}

absl::StatusOr<BulkSocket::Tls> MakeBulkClientTls(const BulkConfig& config, int64_t now_ms) {
  if (config.access.tcp_security == TcpSecurity::kInsecure) return BulkSocket::Tls();
  return MakeTls({config.certificate, config.key, config.peer_ca}, true, now_ms);
}

BulkSocket::BulkSocket(Strand strand, Tls tls)
    : BulkSocket(strand, std::move(tls), tcp::socket(strand)) {}

BulkSocket::BulkSocket(Strand strand, Tls tls, tcp::socket accepted)
    : strand_(std::move(strand)),
      tls_(std::move(tls)),
      no_tls_(tls_ == nullptr ? NewContext() : nullptr),
      stream_(std::move(accepted), tls_ == nullptr ? *no_tls_ : *tls_),
      timer_(strand_) {}

void BulkSocket::ExpireAfter(int64_t timeout_ms) {
  timer_.expires_after(std::chrono::milliseconds(timeout_ms));
  timer_.async_wait([weak = weak_from_this()](const error_code& error) {
    const auto self = weak.lock();
    // A wait that ended just before it was set anew is not this one's end.
    if (error || self == nullptr || self->timer_.expiry() > asio::steady_timer::clock_type::now()) {
      return;
    }
    self->expired_ = true;
    error_code ignored;
    self->tcp().close(ignored);
  });
}

void BulkSocket::NeverExpire() {
  // Not cancelled: a wait that has just ended looks at the time that was set last.
  timer_.expires_at(asio::steady_timer::time_point::max());
}

void BulkSocket::Close() {
  asio::post(strand_, [self = shared_from_this()] {
    error_code ignored;
    self->tcp().close(ignored);
    self->timer_.cancel(ignored);
  });
}

absl::Status BulkSocket::Disconnected(absl::string_view doing, const error_code& error) {
  const std::string why = expired_ ? "it took too long (kvstore.bulk_timeout)" : error.message();
  error_code ignored;
  tcp().close(ignored);
  timer_.cancel(ignored);
  ERR_clear_error();
  return MakeError(absl::StatusCode::kUnavailable, "BULK_DISCONNECTED",
                   absl::StrCat("a connection of the bulk plane ended while ", doing, ": ", why));
}

BulkSocket::Awaitable<absl::Status> BulkSocket::Connect(const std::string& address) {
  const auto [host, port] = SplitAddress(address);
  error_code error;
  tcp::resolver resolver(strand_);
  const auto found =
      co_await resolver.async_resolve(host, port, asio::redirect_error(asio::use_awaitable, error));
  if (error) co_return Disconnected("looking its address up", error);
  for (const auto& entry : found) {
    tcp().close(error);
    co_await tcp().async_connect(entry.endpoint(),
                                 asio::redirect_error(asio::use_awaitable, error));
    if (!error || expired_) break;
  }
  if (error) co_return Disconnected("connecting", error);
  error_code ignored;
  tcp().set_option(tcp::no_delay(true), ignored);
  static const int buffer_bytes = BulkBufferBytes(NumberIn("/proc/sys/net/core/rmem_max"));
  if (buffer_bytes > 0) {
    tcp().set_option(asio::socket_base::receive_buffer_size(buffer_bytes), ignored);
  }
  if (tls_ == nullptr) co_return absl::OkStatus();
  stream_.set_verify_callback(ssl::host_name_verification(host), ignored);
  SSL_set_tlsext_host_name(stream_.native_handle(), host.c_str());
  const absl::Status status = co_await Handshake(ssl::stream_base::client);
  co_return status;
}

BulkSocket::Awaitable<absl::Status> BulkSocket::AcceptTls() {
  error_code ignored;
  tcp().set_option(tcp::no_delay(true), ignored);
  static const int buffer_bytes = BulkBufferBytes(NumberIn("/proc/sys/net/core/wmem_max"));
  if (buffer_bytes > 0) {
    tcp().set_option(asio::socket_base::send_buffer_size(buffer_bytes), ignored);
  }
  if (tls_ == nullptr) co_return absl::OkStatus();
  const absl::Status status = co_await Handshake(ssl::stream_base::server);
  co_return status;
}

BulkSocket::Awaitable<absl::Status> BulkSocket::Handshake(ssl::stream_base::handshake_type type) {
  error_code error;
  co_await stream_.async_handshake(type, asio::redirect_error(asio::use_awaitable, error));
  if (!error) co_return absl::OkStatus();
  const bool is_certificate = error.category() == asio::error::get_ssl_category();
  const absl::Status cut = Disconnected("agreeing on TLS", error);
  if (!is_certificate) co_return cut;
  co_return MakeError(absl::StatusCode::kUnauthenticated, "BULK_TLS_FAILED",
                      absl::StrCat("no TLS with the peer: ", error.message(),
                                   "; are its certificate, authority, name and time right, and "
                                   "has it TLS on?"));
}

CallOrigin BulkSocket::Origin() const {
  CallOrigin origin;
  if (tls_ == nullptr) return origin;
  // The handle is not const, though nothing of it changes.
  auto* handle = const_cast<ssl::stream<tcp::socket>&>(stream_).native_handle();
  X509* certificate = SSL_get_peer_certificate(handle);
  if (certificate == nullptr) return origin;
  BIO* text = BIO_new(BIO_s_mem());
  if (PEM_write_bio_X509(text, certificate) == 1) {
    char* data = nullptr;
    const int64_t size = BIO_get_mem_data(text, &data);
    origin.certificate.assign(data, static_cast<size_t>(size));
  }
  BIO_free(text);
  X509_free(certificate);
  const absl::StatusOr<CertificateInfo> info = ParseCertificate(origin.certificate);
  if (info.ok()) origin.certificate_names = info->names;
  return origin;
}

BulkSocket::Awaitable<absl::StatusOr<BulkFrame>> BulkSocket::ReadFrame() {
  std::array<uint8_t, kBulkHeaderBytes> bytes;
  const std::array<absl::Span<uint8_t>, 1> header_span = {absl::MakeSpan(bytes)};
  int64_t done = 0;
  const absl::Status head = co_await ReadData(header_span, &done);
  if (!head.ok()) co_return head;
  const absl::string_view header(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  const absl::StatusOr<BulkHeader> parsed = ParseBulkHeader(header);
  if (!parsed.ok()) co_return parsed.status();
  BulkFrame frame{*parsed, std::string(static_cast<size_t>(parsed->body_bytes), '\0')};
  const std::array<absl::Span<uint8_t>, 1> body_span = {
      absl::Span<uint8_t>(reinterpret_cast<uint8_t*>(frame.body.data()), frame.body.size())};
  done = 0;
  const absl::Status body = co_await ReadData(body_span, &done);
  if (!body.ok()) co_return body;
  const absl::Status checked = CheckBulkBody(header, frame.body);
  if (!checked.ok()) co_return checked;
  co_return frame;
}

BulkSocket::Awaitable<absl::Status> BulkSocket::ReadData(
    absl::Span<const absl::Span<uint8_t>> spans, int64_t* done) {
  const int64_t total = TotalBytes(spans);
  while (*done < total) {
    const auto buffers = BuffersFrom<asio::mutable_buffer>(spans, *done);
    error_code error;
    size_t count = 0;
    if (tls_ == nullptr) {
      count =
          co_await tcp().async_read_some(buffers, asio::redirect_error(asio::use_awaitable, error));
    } else {
      count = co_await stream_.async_read_some(buffers,
                                               asio::redirect_error(asio::use_awaitable, error));
    }
    *done += static_cast<int64_t>(count);
    if (error) co_return Disconnected("reading", error);
  }
  co_return absl::OkStatus();
}

BulkSocket::Awaitable<absl::Status> BulkSocket::Write(std::string frame,
                                                      absl::Span<const absl::Span<uint8_t>> spans,
                                                      int64_t offset) {
  std::vector<absl::Span<uint8_t>> all = {
      absl::Span<uint8_t>(reinterpret_cast<uint8_t*>(frame.data()), frame.size())};
  int64_t skip = offset;
  for (const auto& span : spans) {
    const auto skipped = std::min(skip, static_cast<int64_t>(span.size()));
    skip -= skipped;
    all.push_back(span.subspan(static_cast<size_t>(skipped)));
  }
  const int64_t total = TotalBytes(all);
  int64_t done = 0;
  while (done < total) {
    const auto buffers = BuffersFrom<asio::const_buffer>(all, done);
    error_code error;
    size_t count = 0;
    if (tls_ == nullptr) {
      count = co_await tcp().async_write_some(buffers,
                                              asio::redirect_error(asio::use_awaitable, error));
    } else {
      count = co_await stream_.async_write_some(buffers,
                                                asio::redirect_error(asio::use_awaitable, error));
    }
    done += static_cast<int64_t>(count);
    if (error) co_return Disconnected("writing", error);
  }
  co_return absl::OkStatus();
}

}  // namespace certkv::kvstore
