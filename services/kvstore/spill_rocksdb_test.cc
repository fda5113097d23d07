// Blocks in RocksDB: written whole, found again after kill -9, refused when they are not ours.
#include "services/kvstore/spill_rocksdb.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <rocksdb/db.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <thread>

#include "kernels/core/status.h"
#include "tests/support/store_harness.h"

namespace certkv::kvstore {
namespace {

using ::testing::HasSubstr;
namespace fs = std::filesystem;

constexpr char kWriterDirectory[] = "CERTKV_TEST_SPILL_DIRECTORY";

// Bytes that follow from a key.
std::vector<uint8_t> PayloadOf(const BlockKey& key, size_t bytes = 20'000) {
  std::vector<uint8_t> payload(bytes);
  for (size_t i = 0; i < bytes; ++i) payload[i] = static_cast<uint8_t>(key.bytes[i % 32] + i / 32);
  return payload;
}

SpilledBlock BlockOf(int32_t chain, int32_t index) {
  SpilledBlock block;
  block.key = ChainKey(chain, index);
  block.parent = ChainParent(chain, index);
  block.originals_digest = static_cast<uint64_t>(chain) * 1000 + index;
  block.seal_time_ms = 5;
  block.write_time_ms = 6 + index;
  return block;
}

class SpillRocksDbTest : public testing::Test {
 protected:
  SpillRocksDbTest()
      : directory_(fs::temp_directory_path() / ("certkv-spill-test-" + std::to_string(getpid()))) {
    fs::remove_all(directory_);
  }
  ~SpillRocksDbTest() override { fs::remove_all(directory_); }

  std::unique_ptr<SpillStore> Open() {
    auto store = OpenRocksDbSpill(directory_);
    EXPECT_TRUE(store.ok()) << store.status();
    return store.ok() ? *std::move(store) : nullptr;
  }
  std::map<BlockKey, SpilledBlock> List(SpillStore& store) {
    std::map<BlockKey, SpilledBlock> found;
    EXPECT_TRUE(store
                    .ForEach([&](const SpecDigest& spec, const SpilledBlock& block) {
                      EXPECT_EQ(spec, spec_);
                      found[block.key] = block;
                      return true;
                    })
                    .ok());
    return found;
  }
  absl::Status Put(SpillStore& store, int32_t chain, int32_t index) {
    SpilledBlock block = BlockOf(chain, index);
    return store.Put(spec_, PayloadOf(block.key), &block);
  }
  // Is the block there with the bytes that were written?
  absl::Status Check(SpillStore& store, const SpilledBlock& block) {
    std::vector<uint8_t> payload(static_cast<size_t>(block.payload_bytes));
    const absl::Status status = store.Get(spec_, block, absl::MakeSpan(payload));
    if (status.ok() && payload != PayloadOf(block.key)) return absl::InternalError("wrong bytes");
    return status;
  }

  // What the directory says of its format; nobody has it open.
  void SetFormat(const std::string& text) {
    WithDefaultFamily([&](rocksdb::DB& db) {
      ASSERT_TRUE(db.Put(rocksdb::WriteOptions(), "certkv.format", text).ok());
    });
  }
  std::string Format() {
    std::string text;
    WithDefaultFamily([&](rocksdb::DB& db) {
      ASSERT_TRUE(db.Get(rocksdb::ReadOptions(), "certkv.format", &text).ok());
    });
    return text;
  }
  template <typename Use>
  void WithDefaultFamily(const Use& use) {
    std::vector<std::string> names;
    ASSERT_TRUE(rocksdb::DB::ListColumnFamilies({}, directory_, &names).ok());
    std::vector<rocksdb::ColumnFamilyDescriptor> families;
    for (const std::string& name : names) families.emplace_back(name, rocksdb::Options());
    std::vector<rocksdb::ColumnFamilyHandle*> handles;
    rocksdb::DB* db = nullptr;
    ASSERT_TRUE(rocksdb::DB::Open({}, directory_, families, &handles, &db).ok());
    use(*db);
    for (rocksdb::ColumnFamilyHandle* handle : handles) db->DestroyColumnFamilyHandle(handle);
    delete db;
  }

  const SpecDigest spec_ = DigestCacheSpec(TinySpec());
  const fs::path directory_;
};

TEST_F(SpillRocksDbTest, BlocksAreFoundByAnotherOpening) {
  auto store = Open();
  for (int32_t i = 0; i < 50; ++i) ASSERT_TRUE(Put(*store, 1, i).ok());
  ASSERT_TRUE(store->Delete(spec_, {ChainKey(1, 7)}).ok());
  store.reset();
  store = Open();
  const auto found = List(*store);
  ASSERT_EQ(found.size(), 49u);
  for (const auto& [key, block] : found) EXPECT_TRUE(Check(*store, block).ok());
  const SpilledBlock& ninth = found.at(ChainKey(1, 9));
  EXPECT_EQ(ninth.parent, ChainKey(1, 8));
  EXPECT_EQ(ninth.originals_digest, 1009u);
  EXPECT_EQ(ninth.seal_time_ms, 5);
  EXPECT_EQ(ninth.write_time_ms, 15);
  EXPECT_EQ(ReasonOf(Check(*store, BlockOf(1, 7))), "SPILL_DAMAGED") << "it was deleted";
}

// What the next test starts as a process and kills.
TEST(SpillRocksDbWriterTest, WritesUntilItIsKilled) {
  const char* directory = std::getenv(kWriterDirectory);
  if (directory == nullptr) GTEST_SKIP() << "another test runs it as a process of its own";
  auto store = OpenRocksDbSpill(directory);
  ASSERT_TRUE(store.ok()) << store.status();
  const int32_t chain = getpid();
  std::ofstream said(std::string(directory) + ".said", std::ios::app);
  for (int32_t i = 0;; ++i) {
    SpilledBlock block = BlockOf(chain, i);
    ASSERT_TRUE((*store)->Put(DigestCacheSpec(TinySpec()), PayloadOf(block.key), &block).ok());
    said << chain << ' ' << i << std::endl;
  }
}

TEST_F(SpillRocksDbTest, KillNineLosesNothingThatWasWrittenAndLeavesNothingHalf) {
  std::mt19937 random(3);
  for (int round = 0; round < 5; ++round) {
    const pid_t child = fork();
    if (child == 0) {
      setenv(kWriterDirectory, directory_.c_str(), 1);
      execl("/proc/self/exe", "writer", "--gtest_filter=SpillRocksDbWriterTest.*",
            static_cast<char*>(nullptr));
      _exit(127);
    }
    const auto said_bytes = [&] {
      std::error_code missing;
      const auto bytes = fs::file_size(directory_.string() + ".said", missing);
      return missing ? 0 : bytes;
    };
    for (const auto before = said_bytes(); said_bytes() < before + 100;) {
      ASSERT_EQ(waitpid(child, nullptr, WNOHANG), 0) << "the writer ended by itself";
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 200));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
  auto store = Open();
  const auto found = List(*store);
  for (const auto& [key, block] : found) ASSERT_TRUE(Check(*store, block).ok());
  std::ifstream said(directory_.string() + ".said");
  int64_t said_count = 0;
  for (int32_t chain, index; said >> chain >> index; ++said_count) {
    ASSERT_EQ(found.count(ChainKey(chain, index)), 1u) << chain << ' ' << index;
  }
  EXPECT_GT(said_count, 50);
  std::printf("%ld blocks written by 5 killed processes, %zu found\n", said_count, found.size());
  fs::remove(directory_.string() + ".said");
}

TEST_F(SpillRocksDbTest, AFlippedByteInAFileIsFound) {
  auto store = Open();
  for (int32_t i = 0; i < 20; ++i) ASSERT_TRUE(Put(*store, 1, i).ok());
  store.reset();
  store = Open();  // what was in the log is in files now
  store.reset();
  int flipped = 0;
  for (const auto& file : fs::directory_iterator(directory_)) {
    if (file.path().extension() != ".blob") continue;
    std::fstream bytes(file.path(), std::ios::in | std::ios::out | std::ios::binary);
    const auto middle = static_cast<std::streamoff>(fs::file_size(file.path()) / 2);
    bytes.seekg(middle);
    const char byte = static_cast<char>(bytes.get() ^ 0x10);
    bytes.seekp(middle);
    bytes.put(byte);
    ++flipped;
  }
  ASSERT_GT(flipped, 0);
  store = Open();
  int damaged = 0;
  for (const auto& [key, block] : List(*store)) {
    const absl::Status status = Check(*store, block);
    if (status.ok()) continue;
    EXPECT_EQ(ReasonOf(status), "SPILL_DAMAGED") << status;
    ++damaged;
  }
  EXPECT_EQ(damaged, flipped);
}

TEST_F(SpillRocksDbTest, ASecretStaysWithTheDirectory) {
  std::string secret;
  for (int opening = 0; opening < 2; ++opening) {
    const auto store = OpenRocksDbSpill(directory_);
    ASSERT_TRUE(store.ok()) << store.status();
    EXPECT_EQ((*store)->Secret().size(), kSpillSecretBytes);
    if (opening == 0) secret = (*store)->Secret();
    EXPECT_EQ((*store)->Secret(), secret);
  }
  const auto other = OpenRocksDbSpill(directory_ / "other");
  ASSERT_TRUE(other.ok()) << other.status();
  EXPECT_NE((*other)->Secret(), secret);
}

TEST_F(SpillRocksDbTest, AForeignDirectoryIsRefused) {
  fs::create_directories(directory_);
  std::ofstream(directory_ / "thesis.tex") << "important";
  const auto store = OpenRocksDbSpill(directory_);
  EXPECT_EQ(ReasonOf(store.status()), "SPILL_FOREIGN");
  EXPECT_THAT(std::string(store.status().message()), HasSubstr("choose an empty directory"));
  EXPECT_TRUE(fs::exists(directory_ / "thesis.tex"));
}

TEST_F(SpillRocksDbTest, AForeignDatabaseIsRefused) {
  rocksdb::Options options;
  options.create_if_missing = true;
  rocksdb::DB* db = nullptr;
  ASSERT_TRUE(rocksdb::DB::Open(options, directory_, &db).ok());
  ASSERT_TRUE(db->Put(rocksdb::WriteOptions(), "somebody", "else").ok());
  delete db;
  EXPECT_EQ(ReasonOf(OpenRocksDbSpill(directory_).status()), "SPILL_FOREIGN");
}

// What a process leaves that is killed while it makes the database, at each of its steps.
TEST_F(SpillRocksDbTest, AMakingThatWasCutIsDoneAgain) {
  fs::create_directories(directory_);
  for (const char* name : {"LOCK", "LOG", "IDENTITY", "MANIFEST-000001", "000001.dbtmp"}) {
    std::ofstream(directory_ / name) << "half";
  }
  EXPECT_TRUE(Put(*Open(), 1, 0).ok()) << "no CURRENT yet";
  EXPECT_EQ(List(*Open()).size(), 1u);

  fs::remove_all(directory_);
  rocksdb::Options options;
  options.create_if_missing = true;
  rocksdb::DB* db = nullptr;
  ASSERT_TRUE(rocksdb::DB::Open(options, directory_, &db).ok());
  delete db;
  EXPECT_TRUE(Put(*Open(), 1, 0).ok()) << "no format yet";
  EXPECT_EQ(List(*Open()).size(), 1u);

  fs::remove_all(directory_);
  Open().reset();
  ASSERT_TRUE(rocksdb::DB::Open(rocksdb::Options(), directory_, &db).ok());
  rocksdb::ColumnFamilyHandle* family = nullptr;
  ASSERT_TRUE(db->CreateColumnFamily({}, ToHex(spec_.view()), &family).ok());
  db->DestroyColumnFamilyHandle(family);
  delete db;
  EXPECT_TRUE(Put(*Open(), 1, 0).ok()) << "no spec in its column family yet";
  EXPECT_EQ(List(*Open()).size(), 1u);
}

TEST_F(SpillRocksDbTest, AnotherFormatVersionIsRefused) {
  Open().reset();
  for (const char* text :
       {"certkv blocks, version 99", "certkv blocks, version 1, tiles version 4",
        "certkv blocks, version 1, tiles version 1", "certkv blocks, version 2, tiles version 3"}) {
    SetFormat(text);
    const auto store = OpenRocksDbSpill(directory_);
    EXPECT_EQ(ReasonOf(store.status()), "SPILL_FORMAT") << text;
    EXPECT_THAT(std::string(store.status().message()), HasSubstr(text));
    EXPECT_THAT(std::string(store.status().message()),
                HasSubstr("'certkv blocks, version 1, tiles version 3' and reads"));
  }
}

TEST_F(SpillRocksDbTest, ADirectoryOfTheReleaseBeforeIsTakenOver) {
  ASSERT_TRUE(Put(*Open(), 1, 0).ok());
  SetFormat("certkv blocks, version 1, tiles version 2");
  auto store = Open();
  ASSERT_NE(store, nullptr);
  const auto found = List(*store);
  ASSERT_EQ(found.size(), 1u);
  EXPECT_TRUE(Check(*store, found.begin()->second).ok());
  store.reset();
  EXPECT_EQ(Format(), "certkv blocks, version 1, tiles version 3")
      << "the release before does not read what is added now";
}

TEST_F(SpillRocksDbTest, AnotherSpecUnderADigestIsRefused) {
  auto store = Open();
  ASSERT_TRUE(Put(*store, 1, 0).ok());
  store.reset();
  std::vector<rocksdb::ColumnFamilyHandle*> handles;
  rocksdb::DB* db = nullptr;
  ASSERT_TRUE(
      rocksdb::DB::Open(rocksdb::DBOptions(), directory_,
                        {{rocksdb::kDefaultColumnFamilyName, {}}, {ToHex(spec_.view()), {}}},
                        &handles, &db)
          .ok());
  ASSERT_TRUE(db->Put(rocksdb::WriteOptions(), handles[1], "spec", std::string(32, 'x')).ok());
  for (auto* handle : handles) db->DestroyColumnFamilyHandle(handle);
  delete db;
  EXPECT_EQ(ReasonOf(OpenRocksDbSpill(directory_).status()), "SPILL_SPEC_MISMATCH");
}

TEST_F(SpillRocksDbTest, ADirectoryThatIsOpenIsRefused) {
  const auto store = Open();
  EXPECT_EQ(ReasonOf(OpenRocksDbSpill(directory_).status()), "SPILL_IN_USE");
}

TEST_F(SpillRocksDbTest, ADamagedDatabaseIsSaidNotServed) {
  Open().reset();
  for (const auto& file : fs::directory_iterator(directory_)) {
    if (file.path().filename().string().rfind("MANIFEST", 0) == 0) fs::resize_file(file.path(), 3);
  }
  const auto store = OpenRocksDbSpill(directory_);
  EXPECT_FALSE(store.ok());
  EXPECT_FALSE(absl::IsFailedPrecondition(store.status())) << store.status();
}

TEST_F(SpillRocksDbTest, AFullDiskIsAnErrorOfTheWriteAlone) {
  auto store = Open();
  ASSERT_TRUE(Put(*store, 1, 0).ok());
  // The log of writes may not grow beyond this.
  signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  rlimit small = before;
  small.rlim_cur = 60'000;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  absl::Status status;
  for (int32_t i = 1; i < 100 && status.ok(); ++i) status = Put(*store, 1, i);
  EXPECT_EQ(ReasonOf(status), "SPILL_FAILED") << status;
  EXPECT_TRUE(Check(*store, List(*store).at(ChainKey(1, 0))).ok()) << "reads go on";
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  const absl::Status recovered = store->Recover();
  if (!recovered.ok()) {  // RocksDB may want to be opened again
    store.reset();
    store = Open();
  }
  EXPECT_TRUE(Put(*store, 2, 0).ok());
  for (const auto& [key, block] : List(*store)) EXPECT_TRUE(Check(*store, block).ok());
}

TEST_F(SpillRocksDbTest, AFullDiskWhileAColumnFamilyIsMadeLeavesNoneWithoutItsSpec) {
  const SpecDigest other = DigestCacheSpec(TinySpec("another"));
  const SpilledBlock block = BlockOf(7, 0);
  signal(SIGXFSZ, SIG_IGN);
  rlimit before{};
  getrlimit(RLIMIT_FSIZE, &before);
  // The log of writes is longer than all of them; what else is written before it fails at a moment
  // of its own: the list of families, the file of options, and the spec in the new family.
  for (const rlim_t limit_bytes : {1, 300, 3'000, 20'000, 100'000}) {
    SCOPED_TRACE(limit_bytes);
    fs::remove_all(directory_);
    auto store = Open();
    for (int32_t i = 0; i < 4; ++i) ASSERT_TRUE(Put(*store, 1, i).ok());
    rlimit small = before;
    small.rlim_cur = limit_bytes;
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
    SpilledBlock failed = block;
    const absl::Status status = store->Put(other, PayloadOf(block.key), &failed);
    SpilledBlock again = block;
    const absl::Status second = store->Put(other, PayloadOf(block.key), &again);
    ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
    EXPECT_EQ(ReasonOf(status), "SPILL_FAILED") << status;
    EXPECT_EQ(ReasonOf(second), "SPILL_FAILED") << second;
    store->Recover().IgnoreError();
    store.reset();
    store = Open();  // fails where a family is without its spec
    ASSERT_NE(store, nullptr);
    EXPECT_EQ(List(*store).size(), 4u) << "none of the other spec";
    SpilledBlock good = block;
    ASSERT_TRUE(store->Put(other, PayloadOf(block.key), &good).ok());
    std::vector<uint8_t> payload(static_cast<size_t>(good.payload_bytes));
    EXPECT_TRUE(store->Get(other, good, absl::MakeSpan(payload)).ok());
    EXPECT_EQ(payload, PayloadOf(block.key));
  }
}

}  // namespace
}  // namespace certkv::kvstore
