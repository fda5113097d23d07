#include "services/kvstore/spill_rocksdb.h"

#include <rocksdb/db.h>
#include <rocksdb/env.h>
#include <rocksdb/options.h>
#include <rocksdb/write_batch.h>
#include <xxhash.h>

#include <algorithm>
#include <array>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "kernels/core/status.h"
#include "kernels/core/tile_layout.h"
#include "services/common/log.h"
#include "services/common/random_id.h"
#include "services/kvstore/spill_record.h"

namespace certkv::kvstore {
namespace {

// Keys: kFormatKey and kSecretKey in the default column family; in the others kSpecKey, and for
// each block a record under 'm' + key and its payload under 'b' + key, written together.
constexpr char kFormatKey[] = "certkv.format";
constexpr char kSecretKey[] = "certkv.secret";
constexpr char kSpecKey[] = "spec";
constexpr char kRecordPrefix = 'm';
constexpr char kPayloadPrefix = 'b';
constexpr uint64_t kBlobBytesMin = 4096;

rocksdb::Slice SliceOf(absl::string_view view) { return {view.data(), view.size()}; }

std::string KeyOf(char prefix, const BlockKey& key) {
  std::string text(1, prefix);
  text.append(key.view().data(), key.view().size());
  return text;
}

std::string FormatText(int tile_format_version = kTileFormatVersion) {
  return absl::StrCat("certkv blocks, version ", kSpillFormatVersion, ", tiles version ",
                      tile_format_version);
}

// What a directory of the release before this one says, and a store of this one reads: its tiles
// have other sizes or are refused by their header, and are made again from the originals.
std::string FormatTextBefore() { return FormatText(kTileFormatVersion - 1); }

absl::Status Damaged(absl::string_view what) {
  return MakeError(absl::StatusCode::kDataLoss, "SPILL_DAMAGED",
                   absl::StrCat("blocks on disk: ", what,
                                "; the store goes on from memory; if it comes again, check the "
                                "disk and remove spill_directory"));
}

absl::Status FromRocksDb(const rocksdb::Status& status, absl::string_view what) {
  if (status.ok()) return absl::OkStatus();
  const std::string text = absl::StrCat(what, ": ", status.ToString());
  if (status.IsCorruption() || status.IsNotFound()) return Damaged(text);
  return MakeError(
      absl::StatusCode::kUnavailable, "SPILL_FAILED",
      absl::StrCat(text, "; the store goes on from memory; free space or check the disk"));
}

absl::Status Refused(absl::string_view reason, absl::string_view what) {
  return MakeError(absl::StatusCode::kFailedPrecondition, reason, what);
}

rocksdb::ColumnFamilyOptions BlockOptions() {
  rocksdb::ColumnFamilyOptions options;
  options.enable_blob_files = true;
  options.min_blob_size = kBlobBytesMin;
  options.enable_blob_garbage_collection = true;
  options.blob_garbage_collection_age_cutoff = 0.5;
  options.compression = rocksdb::kNoCompression;  // 16-bit noise doesn't shrink
  options.blob_compression_type = rocksdb::kNoCompression;
  options.write_buffer_size = size_t{32} << 20;
  options.max_write_buffer_number = 2;
  return options;
}

// What RocksDB has to say goes to our log. Not to a file beside the blocks, which is its default:
// its writer aborts the process at the second line after the disk is full (seen with 7.8).
class RocksDbLog final : public rocksdb::Logger {
 public:
  RocksDbLog() : rocksdb::Logger(rocksdb::WARN_LEVEL) {}
  using rocksdb::Logger::Logv;
  void Logv(const char* format, va_list arguments) override {
    std::array<char, 1024> text{};
    std::vsnprintf(text.data(), text.size(), format, arguments);
    Log(LogLevel::kWarning, "rocksdb", {{"message", absl::string_view(text.data())}});
  }
};

class RocksDbSpill final : public SpillStore {
 public:
  ~RocksDbSpill() override {
    for (const auto& entry : families_) db_->DestroyColumnFamilyHandle(entry.second);
    if (default_ != nullptr) db_->DestroyColumnFamilyHandle(default_);
  }

  absl::Status Open(const std::string& directory) {
    rocksdb::DBOptions options;
    options.create_if_missing = true;
    options.max_background_jobs = 2;
    options.max_total_wal_size = uint64_t{128} << 20;
    options.bytes_per_sync = uint64_t{1} << 20;
    options.info_log = std::make_shared<RocksDbLog>();
    const bool is_new = !std::filesystem::exists(directory + "/CURRENT");
    std::vector<std::string> names = {rocksdb::kDefaultColumnFamilyName};
    if (!is_new) {
      names.clear();
      CERTKV_RETURN_IF_ERROR(FromRocksDb(
          rocksdb::DB::ListColumnFamilies(options, directory, &names), "listing " + directory));
    }
    std::vector<rocksdb::ColumnFamilyDescriptor> descriptors;
    for (const std::string& name : names) descriptors.emplace_back(name, BlockOptions());
    std::vector<rocksdb::ColumnFamilyHandle*> handles;
    rocksdb::DB* db = nullptr;
    const rocksdb::Status opened =
        rocksdb::DB::Open(options, directory, descriptors, &handles, &db);
    if (opened.IsIOError() && absl::StrContains(opened.ToString(), "lock")) {
      return Refused("SPILL_IN_USE",
                     absl::StrCat("another process has ", directory, " open: ", opened.ToString(),
                                  "; stop it or choose another spill_directory"));
    }
    CERTKV_RETURN_IF_ERROR(FromRocksDb(opened, "opening " + directory));
    db_.reset(db);
    absl::MutexLock lock(&mutex_);
    std::vector<std::pair<std::string, rocksdb::ColumnFamilyHandle*>> others;
    for (size_t i = 0; i < names.size(); ++i) {
      if (names[i] == rocksdb::kDefaultColumnFamilyName) {
        default_ = handles[i];
      } else {
        others.emplace_back(names[i], handles[i]);
      }
    }
    // A process that was killed while it made the database may have left it without our mark.
    if (is_new || (others.empty() && IsEmpty(default_))) {
      CERTKV_RETURN_IF_ERROR(
          FromRocksDb(db_->Put(rocksdb::WriteOptions(), default_, kFormatKey, FormatText()),
                      "writing the format version"));
      return FindOrMakeSecret();
    }
    absl::Status format = CheckFormat(directory);
    if (format.ok()) format = FindOrMakeSecret();
    for (const auto& [name, handle] : others) {
      const absl::Status spec = format.ok() ? AddFamily(directory, name, handle) : format;
      if (spec.ok()) continue;
      db_->DestroyColumnFamilyHandle(handle);
      if (family_status_.ok()) family_status_ = spec;
    }
    return format.ok() ? family_status_ : format;
  }

  absl::Status ForEach(
      const std::function<bool(const SpecDigest&, const SpilledBlock&)>& visit) override {
    for (const auto& [digest, family] : Families()) {
      rocksdb::ReadOptions options;
      const std::string end(1, kRecordPrefix + 1);
      const rocksdb::Slice end_slice(end);
      options.iterate_upper_bound = &end_slice;
      options.fill_cache = false;
      const std::unique_ptr<rocksdb::Iterator> it(db_->NewIterator(options, family));
      for (it->Seek(std::string(1, kRecordPrefix)); it->Valid(); it->Next()) {
        SpilledBlock block;
        // A record that can't be read is a block that isn't there.
        if (ParseSpillRecord({it->value().data(), it->value().size()}, &block) &&
            !visit(digest, block)) {
          return absl::OkStatus();
        }
      }
      CERTKV_RETURN_IF_ERROR(FromRocksDb(it->status(), "listing blocks"));
    }
    return absl::OkStatus();
  }

  absl::Status Put(const SpecDigest& spec, absl::Span<const uint8_t> payload,
                   SpilledBlock* block) override {
    CERTKV_ASSIGN_OR_RETURN(rocksdb::ColumnFamilyHandle * family, FamilyOf(spec));
    block->payload_bytes = static_cast<int64_t>(payload.size());
    block->payload_checksum = XXH3_64bits(payload.data(), payload.size());
    const std::string record = EncodeSpillRecord(*block);
    rocksdb::WriteBatch batch;
    batch.Put(family, KeyOf(kPayloadPrefix, block->key),
              rocksdb::Slice(reinterpret_cast<const char*>(payload.data()), payload.size()));
    batch.Put(family, KeyOf(kRecordPrefix, block->key), record);
    return FromRocksDb(db_->Write(rocksdb::WriteOptions(), &batch), "writing a block");
  }

  absl::Status Get(const SpecDigest& spec, const SpilledBlock& block,
                   absl::Span<uint8_t> payload) override {
    CERTKV_ASSIGN_OR_RETURN(rocksdb::ColumnFamilyHandle * family, FamilyOf(spec));
    rocksdb::PinnableSlice value;
    rocksdb::ReadOptions options;
    options.fill_cache = false;  // the store's memory is the cache
    CERTKV_RETURN_IF_ERROR(
        FromRocksDb(db_->Get(options, family, KeyOf(kPayloadPrefix, block.key), &value),
                    absl::StrCat("reading block ", ToHex(block.key.view(), 8))));
    if (value.size() != payload.size() ||
        XXH3_64bits(value.data(), value.size()) != block.payload_checksum) {
      return Damaged(absl::StrCat("block ", ToHex(block.key.view(), 8), " has ", value.size(),
                                  " bytes of another checksum than when it was written, expected ",
                                  payload.size()));
    }
    std::memcpy(payload.data(), value.data(), value.size());
    return absl::OkStatus();
  }

  absl::Status Delete(const SpecDigest& spec, absl::Span<const BlockKey> keys) override {
    CERTKV_ASSIGN_OR_RETURN(rocksdb::ColumnFamilyHandle * family, FamilyOf(spec));
    rocksdb::WriteBatch batch;
    for (const BlockKey& key : keys) {
      batch.Delete(family, KeyOf(kRecordPrefix, key));
      batch.Delete(family, KeyOf(kPayloadPrefix, key));
    }
    return FromRocksDb(db_->Write(rocksdb::WriteOptions(), &batch), "deleting blocks");
  }

  std::string Secret() const override { return secret_; }

  absl::Status Recover() override { return FromRocksDb(db_->Resume(), "resuming after an error"); }

 private:
  using FamilyMap = absl::flat_hash_map<SpecDigest, rocksdb::ColumnFamilyHandle*>;

  FamilyMap Families() ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    return families_;
  }

  bool IsEmpty(rocksdb::ColumnFamilyHandle* family) const {
    const std::unique_ptr<rocksdb::Iterator> all(db_->NewIterator(rocksdb::ReadOptions(), family));
    all->SeekToFirst();
    return !all->Valid() && all->status().ok();
  }

  absl::Status WriteSpec(const SpecDigest& spec, rocksdb::ColumnFamilyHandle* family) {
    return FromRocksDb(db_->Put(rocksdb::WriteOptions(), family, kSpecKey, SliceOf(spec.view())),
                       "writing the spec digest");
  }

  absl::Status CheckFormat(const std::string& directory) {
    std::string text;
    const rocksdb::Status read = db_->Get(rocksdb::ReadOptions(), default_, kFormatKey, &text);
    if (read.IsNotFound()) {
      return Refused("SPILL_FOREIGN",
                     absl::StrCat(directory,
                                  " holds a database that is not CertKV's; choose an "
                                  "empty directory as spill_directory"));
    }
    CERTKV_RETURN_IF_ERROR(FromRocksDb(read, "reading the format version"));
    if (text == FormatText()) return absl::OkStatus();
    if (text != FormatTextBefore()) {
      return Refused("SPILL_FORMAT",
                     absl::StrCat(directory, " holds '", text, "', this release writes '",
                                  FormatText(), "' and reads '", FormatTextBefore(),
                                  "' too; remove the directory, or run the release that wrote it"));
    }
    // From now on tiles of this release are added, which that one does not read.
    rocksdb::WriteOptions options;
    options.sync = true;
    CERTKV_RETURN_IF_ERROR(FromRocksDb(db_->Put(options, default_, kFormatKey, FormatText()),
                                       "writing the format version"));
    Log(LogLevel::kInfo, "spill_upgraded",
        {{"directory", directory}, {"from", text}, {"to", FormatText()}});
    return absl::OkStatus();
  }

  // A store of before there were secrets has none.
  absl::Status FindOrMakeSecret() {
    const rocksdb::Status read = db_->Get(rocksdb::ReadOptions(), default_, kSecretKey, &secret_);
    if (read.IsNotFound()) {
      secret_ = RandomBytes(kSpillSecretBytes);
      rocksdb::WriteOptions options;
      options.sync = true;
      return FromRocksDb(db_->Put(options, default_, kSecretKey, secret_), "writing the secret");
    }
    CERTKV_RETURN_IF_ERROR(FromRocksDb(read, "reading the secret"));
    if (secret_.size() == kSpillSecretBytes) return absl::OkStatus();
    return Damaged(
        absl::StrCat("the secret has ", secret_.size(), " bytes, expected ", kSpillSecretBytes));
  }

  // Takes a column family over, once its spec is the one that its name says. An empty one was made
  // by a process that was killed before it wrote the spec.
  absl::Status AddFamily(const std::string& directory, const std::string& name,
                         rocksdb::ColumnFamilyHandle* family)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    std::string bytes;
    const rocksdb::Status read = db_->Get(rocksdb::ReadOptions(), family, kSpecKey, &bytes);
    if (!read.ok() && !read.IsNotFound()) return FromRocksDb(read, "reading the spec digest");
    if (read.IsNotFound() && IsEmpty(family) &&
        std::all_of(name.begin(), name.end(), absl::ascii_isxdigit)) {
      bytes = absl::HexStringToBytes(name);
    }
    const absl::StatusOr<SpecDigest> digest = SpecDigestFromBytes(bytes);
    if (!digest.ok() || ToHex(digest->view()) != name) {
      return Refused("SPILL_SPEC_MISMATCH",
                     absl::StrCat(directory, " has blocks of spec ", ToHex(bytes, bytes.size()),
                                  " under the name ", name,
                                  "; they were moved or damaged: remove the directory"));
    }
    if (read.IsNotFound()) CERTKV_RETURN_IF_ERROR(WriteSpec(*digest, family));
    families_[*digest] = family;
    return absl::OkStatus();
  }

  absl::StatusOr<rocksdb::ColumnFamilyHandle*> FamilyOf(const SpecDigest& spec)
      ABSL_LOCKS_EXCLUDED(mutex_) {
    absl::MutexLock lock(&mutex_);
    const auto found = families_.find(spec);
    if (found != families_.end()) return found->second;
    rocksdb::ColumnFamilyHandle* family = nullptr;
    CERTKV_RETURN_IF_ERROR(
        FromRocksDb(db_->CreateColumnFamily(BlockOptions(), ToHex(spec.view()), &family),
                    "making a column family"));
    const absl::Status written = WriteSpec(spec, family);
    if (!written.ok()) {
      // Blocks in a family without its spec would be refused when the store starts again.
      db_->DropColumnFamily(family);
      db_->DestroyColumnFamilyHandle(family);
      return written;
    }
    families_[spec] = family;
    return family;
  }

  std::unique_ptr<rocksdb::DB> db_;
  std::string secret_;  // since Open
  rocksdb::ColumnFamilyHandle* default_ = nullptr;
  absl::Status family_status_;
  absl::Mutex mutex_;
  FamilyMap families_ ABSL_GUARDED_BY(mutex_);
};

// Does the directory hold only what RocksDB writes before CURRENT, the last file of making a
// database? Then a process was killed in between, and RocksDB begins anew over it.
bool IsCutCreation(const std::string& directory, std::error_code& error) {
  for (const auto& entry : std::filesystem::directory_iterator(directory, error)) {
    const std::string name = entry.path().filename();
    if (name != "LOCK" && name != "LOG" && name != "IDENTITY" &&
        !absl::StartsWith(name, "LOG.old.") && !absl::StartsWith(name, "MANIFEST-") &&
        !absl::EndsWith(name, ".dbtmp")) {
      return false;
    }
  }
  return !error;
}

// Makes the directory; refuses one that has something else in it.
absl::Status PrepareDirectory(const std::string& directory) {
  std::error_code error;
  std::filesystem::create_directories(directory, error);
  if (!error) {
    std::filesystem::permissions(directory, std::filesystem::perms::owner_all, error);
  }
  const bool is_unmade = !error && IsCutCreation(directory, error);
  if (error) {
    return MakeError(absl::StatusCode::kUnavailable, "SPILL_FAILED",
                     absl::StrCat(directory, ": ", error.message(),
                                  "; choose a spill_directory that the store may write"));
  }
  if (is_unmade || std::filesystem::exists(directory + "/CURRENT")) return absl::OkStatus();
  return Refused("SPILL_FOREIGN", absl::StrCat(directory,
                                               " has files that are not CertKV's; choose an empty "
                                               "directory as spill_directory"));
}

}  // namespace

absl::StatusOr<std::unique_ptr<SpillStore>> OpenRocksDbSpill(const std::string& directory) {
  CERTKV_RETURN_IF_ERROR(PrepareDirectory(directory));
  auto store = std::make_unique<RocksDbSpill>();
  CERTKV_RETURN_IF_ERROR(store->Open(directory));
  return std::unique_ptr<SpillStore>(std::move(store));
}

}  // namespace certkv::kvstore
